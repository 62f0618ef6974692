"""The ledger: a rollout is counted exactly once, whatever dies."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.orchestrator.ledger import MAX_ATTEMPTS, Ledger
from paceline.types import PacelineError, Prompt, Rollout, RolloutRequest

PROMPT = Prompt(id="p", text="", token_ids=np.zeros(1, np.int32), row={})


def open_group(ledger: Ledger, group_id: int, size: int, *, batch: int = 0, expected: float = 0.0) -> None:
    requests = [
        RolloutRequest(group_id=group_id, index=i, prompt_ids=PROMPT.token_ids, max_tokens=1, temperature=1.0)
        for i in range(size)
    ]
    ledger.open(batch=batch, prompt=PROMPT, requests=requests, expected_length=expected)


def finished(request: RolloutRequest, engine: str) -> Rollout:
    return Rollout(
        group_id=request.group_id,
        index=request.index,
        prompt_ids=request.prompt_ids,
        token_ids=np.zeros(1, np.int32),
        logp=np.zeros(1, np.float32),
        finish_reason="stop",
        policy_version=0,
        policy_version_end=0,
        engine=engine,
        started_s=0.0,
        finished_s=1.0,
    )


def test_group_is_handed_out_once_and_in_order_of_index():
    ledger = Ledger()
    open_group(ledger, 7, 2)
    first, second = ledger.assign("a"), ledger.assign("b")
    assert ledger.accept(finished(second, "b"), "b")
    assert ledger.close(7) is None
    assert ledger.accept(finished(first, "a"), "a")
    group = ledger.close(7)
    assert group is not None
    assert [(r.index, r.engine) for r in group.rollouts] == [(0, "a"), (1, "b")]


def test_second_delivery_of_a_rollout_is_not_counted():
    ledger = Ledger()
    open_group(ledger, 0, 2)
    request = ledger.assign("a")
    assert ledger.accept(finished(request, "a"), "a")
    assert not ledger.accept(finished(request, "a"), "a")
    assert ledger.num_duplicates == 1
    assert ledger.close(0) is None


def test_late_delivery_of_a_lost_engine_does_not_displace_the_one_it_was_given_to():
    ledger = Ledger()
    open_group(ledger, 0, 1)
    request = ledger.assign("a")
    assert ledger.lose("a") == 1
    assert ledger.assign("b").key == request.key
    assert not ledger.accept(finished(request, "a"), "a")
    assert ledger.accept(finished(request, "b"), "b")
    group = ledger.close(0)
    assert group is not None and group.rollouts[0].engine == "b"


def test_longest_expected_rollouts_of_the_oldest_batch_leave_first():
    ledger = Ledger()
    open_group(ledger, 0, 1, batch=1, expected=900)
    open_group(ledger, 1, 1, batch=0, expected=10)
    open_group(ledger, 2, 1, batch=0, expected=500)
    assert [ledger.assign("a").group_id for _ in range(3)] == [2, 1, 0]


def test_a_prompt_that_loses_engine_after_engine_stops_the_run():
    ledger = Ledger()
    open_group(ledger, 0, 1)
    for attempt in range(MAX_ATTEMPTS - 1):
        ledger.assign(f"engine-{attempt}")
        ledger.lose(f"engine-{attempt}")
    ledger.assign("last")
    with pytest.raises(PacelineError, match="'p' was on 3 engines"):
        ledger.lose("last")


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.sampled_from(["assign", "finish", "again", "lose"]), st.integers(0, 3)), max_size=120))
def test_no_order_of_events_loses_or_doubles_a_rollout(events):
    ledger = Ledger()
    for group_id in range(4):
        open_group(ledger, group_id, 3)
    held: dict[str, list[RolloutRequest]] = {f"e{i}": [] for i in range(4)}
    taken: list[tuple[int, int]] = []
    losses = 0
    for what, which in events:
        engine = f"e{which}"
        if what == "assign" and ledger.num_pending:
            held[engine].append(ledger.assign(engine))
        elif what == "finish" and held[engine]:
            request = held[engine].pop()
            assert ledger.accept(finished(request, engine), engine)
            taken.append(request.key)
        elif what == "again" and taken:
            key = taken[which % len(taken)]
            request = RolloutRequest(
                group_id=key[0], index=key[1], prompt_ids=PROMPT.token_ids, max_tokens=1, temperature=1.0
            )
            assert not ledger.accept(finished(request, engine), engine)
        elif what == "lose" and losses < MAX_ATTEMPTS - 1:
            losses += 1
            assert ledger.lose(engine) == len(held[engine])
            held[engine] = []
    assert len(set(taken)) == len(taken)
    assert ledger.num_pending + sum(map(len, held.values())) + len(taken) == 12
    assert all(ledger.load(engine) == len(requests) for engine, requests in held.items())
