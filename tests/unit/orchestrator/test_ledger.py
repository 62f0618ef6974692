"""The ledger: a rollout is counted exactly once, whatever dies."""

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.orchestrator.ledger import MAX_LOSSES, Ledger
from paceline.types import GroupId, Prompt, Rollout, RolloutId, RolloutRequest

PROMPT = Prompt(id="p", text="", token_ids=np.zeros(1, np.int32), row={})


def open_group(ledger: Ledger, number: int, size: int, *, batch: int = 0, expected: float = 0.0) -> None:
    requests = [
        RolloutRequest(group_id=GroupId(number), index=i, prompt_ids=PROMPT.token_ids, max_tokens=1, temperature=1.0)
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
        version_spans=((0, 1),),
        engine=engine,
        started_s=0.0,
        finished_s=1.0,
    )


def take(ledger: Ledger, engine: str) -> RolloutRequest:
    request = ledger.assign(engine, together=True)
    assert request is not None
    return request


def test_group_is_handed_out_once_and_in_order_of_index():
    ledger = Ledger()
    open_group(ledger, 7, 2)
    first, second = take(ledger, "a"), take(ledger, "b")
    assert ledger.accept(finished(second, "b"), "b")
    assert ledger.close(GroupId(7)) is None
    assert ledger.accept(finished(first, "a"), "a")
    group = ledger.close(GroupId(7))
    assert group is not None
    assert [(r.index, r.engine) for r in group.rollouts] == [(0, "a"), (1, "b")]


def test_second_delivery_of_a_rollout_is_not_counted():
    ledger = Ledger()
    open_group(ledger, 0, 2)
    request = take(ledger, "a")
    assert ledger.accept(finished(request, "a"), "a")
    assert not ledger.accept(finished(request, "a"), "a")
    assert ledger.num_duplicates == 1
    assert ledger.close(GroupId(0)) is None


def test_late_delivery_of_a_lost_engine_does_not_displace_the_one_it_was_given_to():
    ledger = Ledger()
    open_group(ledger, 0, 1)
    request = take(ledger, "a")
    assert ledger.lose("a") == (1, None)
    assert take(ledger, "b").id == request.id
    assert not ledger.accept(finished(request, "a"), "a")
    assert ledger.accept(finished(request, "b"), "b")
    group = ledger.close(GroupId(0))
    assert group is not None and group.rollouts[0].engine == "b"


def test_longest_expected_rollouts_of_the_oldest_batch_leave_first():
    ledger = Ledger()
    open_group(ledger, 0, 1, batch=1, expected=900)
    open_group(ledger, 1, 1, batch=0, expected=10)
    open_group(ledger, 2, 1, batch=0, expected=500)
    assert groups_of(ledger, *"aaa") == [2, 1, 0]


def lose_with(ledger: Ledger, engines: Sequence[str]) -> None:
    """Give all that is pending to each of these engines, which dies with it."""
    for engine in engines:
        while ledger.num_pending and ledger.assign(engine, together=True) is not None:
            pass
        ledger.lose(engine)


def test_a_prompt_that_loses_engine_after_engine_is_dropped_with_its_group_alone():
    ledger = Ledger()
    open_group(ledger, 0, 2)
    open_group(ledger, 1, 2)
    lose_with(ledger, [f"e{number}" for number in range(MAX_LOSSES)])
    assert ledger.num_pending == 4
    suspect = take(ledger, "last")
    second = ledger.assign("last", together=True)
    assert second is None, "a second suspect on the same engine: nobody could say which of them it was"
    other = take(ledger, "other")
    redispatched, dropped = ledger.lose("last")
    assert redispatched == 0
    assert dropped is not None and (dropped.group_id, dropped.num_done, dropped.num_rollouts) == (GroupId(0), 0, 2)
    assert suspect.group_id == other.group_id == GroupId(0)
    assert not ledger.accept(finished(other, "other"), "other"), "of a group that is no more"
    assert ledger.load("other") == 0
    for _ in range(2):
        request = take(ledger, "other")
        assert request.group_id == GroupId(1) and ledger.accept(finished(request, "other"), "other")
    assert ledger.close(GroupId(1)) is not None
    assert (ledger.num_pending, ledger.num_assigned) == (0, 0)


def test_suspects_wait_until_no_other_rollout_would_die_with_them():
    ledger = Ledger()
    open_group(ledger, 0, 1, expected=900)
    lose_with(ledger, ["a", "b"])
    open_group(ledger, 1, 1, batch=1)
    assert groups_of(ledger, *"cc") == [1, 0]


def test_suspect_that_is_done_is_innocent():
    ledger = Ledger()
    open_group(ledger, 0, 2)
    lose_with(ledger, ["a", "b"])
    first = take(ledger, "c")
    assert ledger.accept(finished(first, "c"), "c")
    assert take(ledger, "c").id != first.id


@settings(max_examples=200)
@given(st.lists(st.tuples(st.sampled_from(["assign", "finish", "again", "lose"]), st.integers(0, 3)), max_size=120))
def test_no_order_of_events_loses_or_doubles_a_rollout(events):
    ledger = Ledger()
    for number in range(4):
        open_group(ledger, number, 3)
    held: dict[str, list[RolloutRequest]] = {f"e{i}": [] for i in range(4)}
    taken: list[RolloutId] = []
    gone: set[GroupId] = set()
    for what, which in events:
        engine = f"e{which}"
        if what == "assign" and ledger.num_pending:
            if (request := ledger.assign(engine, together=True)) is not None:
                held[engine].append(request)
        elif what == "finish" and held[engine]:
            request = held[engine].pop()
            assert ledger.accept(finished(request, engine), engine)
            taken.append(request.id)
        elif what == "again" and taken:
            again = taken[which % len(taken)]
            request = RolloutRequest(
                group_id=again.group_id, index=again.index, prompt_ids=PROMPT.token_ids, max_tokens=1, temperature=1.0
            )
            assert not ledger.accept(finished(request, engine), engine)
        elif what == "lose":
            redispatched, dropped = ledger.lose(engine)
            lost, held[engine] = held[engine], []
            if dropped is not None:
                gone.add(dropped.group_id)
                assert any(request.group_id == dropped.group_id for request in lost)
                held = {e: [r for r in rs if r.group_id != dropped.group_id] for e, rs in held.items()}
            assert redispatched == sum(request.group_id not in gone for request in lost)
    assert len(set(taken)) == len(taken)
    kept = [one for one in taken if one.group_id not in gone]
    assert ledger.num_pending + sum(map(len, held.values())) + len(kept) == 12 - 3 * len(gone)
    assert all(ledger.load(engine) == len(requests) for engine, requests in held.items())


def groups_of(ledger: Ledger, *engines: str) -> list[int]:
    return [take(ledger, engine).group_id.number for engine in engines]


def test_engines_go_on_with_their_own_groups_and_split_one_only_when_none_is_left():
    """Siblings that are dealt out in turn make every engine read every prompt."""
    ledger = Ledger()
    for number in range(3):
        open_group(ledger, number, 3)
    assert groups_of(ledger, "a", "b", "a", "b", "a", "b") == [0, 1, 0, 1, 0, 1]
    assert groups_of(ledger, "b", "a", "a") == [2, 2, 2]
    assert ledger.num_pending == 0


def test_older_batch_goes_before_a_group_that_an_engine_has_begun():
    ledger = Ledger()
    open_group(ledger, 0, 1, batch=0)
    open_group(ledger, 1, 3, batch=1)
    assert groups_of(ledger, "a", "b", "b") == [0, 1, 1]
    ledger.lose("a")
    assert groups_of(ledger, "b", "b") == [0, 1]


def test_group_of_a_lost_engine_is_taken_up_by_one_engine():
    ledger = Ledger()
    open_group(ledger, 0, 3)
    open_group(ledger, 1, 4)
    assert groups_of(ledger, "a", "a", "b") == [0, 0, 1]
    ledger.lose("a")
    assert groups_of(ledger, "c", "b", "c", "b", "c", "b") == [0, 1, 0, 1, 0, 1]
    assert ledger.num_pending == 0


def test_group_that_was_dropped_and_opened_again_is_handed_out_once():
    ledger = Ledger()
    open_group(ledger, 0, 3)
    assert groups_of(ledger, "a") == [0]
    ledger.drop(GroupId(0))
    assert ledger.num_pending == 0
    open_group(ledger, 0, 2, batch=1)
    assert [take(ledger, engine).id for engine in ("a", "b")] == [RolloutId(GroupId(0), index) for index in range(2)]
    assert ledger.num_pending == 0
