"""How `python -m benchmarks rollout` turns batches into figures; a wrong one here would be a wrong claim."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from benchmarks import workload
from benchmarks.harness import Record
from benchmarks.rollout import accepted_length, best_table, equal_rollouts, ratios, speedup_by_batch
from benchmarks.workload import asked_for, give_group_lengths
from contexts import make_context
from paceline.config import EngineConfig
from paceline.rollout import stepped
from paceline.rollout.stepped import Order, SteppedBatch, SteppedEngine, Turn, lockstep
from paceline.selector.cost import Step
from paceline.types import GroupId, RolloutRequest


def step(num_requests: int, k: int, seconds: float, emitted_each: int) -> Step:
    accepted = tuple(num_requests if position < emitted_each - 1 else 0 for position in range(k))
    return Step(
        num_requests=num_requests,
        num_prefill_tokens=0,
        context_tokens=100,
        verified=k,
        drafted=k,
        seconds=seconds,
        proposed_at=(num_requests,) * k,
        accepted_at=accepted,
        num_emitted=num_requests * emitted_each,
    )


def batch(
    seconds: float, steps: list[Step] | None = None, step_s: list[tuple[int, float]] | None = None
) -> SteppedBatch:
    return SteppedBatch(
        seconds=seconds, finished_s=[seconds], token_ids=[[5]], step_s=step_s or [], steps=steps or [], figures={}
    )


def test_best_table_takes_the_highest_rate_of_each_batch_size():
    """Hindsight that is not the best of what was measured would make the selector look better than it is."""
    survey = {
        0: [batch(1, [step(1, 0, 0.10, 1), step(40, 0, 0.20, 1)])],  # 10 and 200 tokens/s
        3: [batch(1, [step(1, 3, 0.15, 3), step(40, 3, 0.80, 3)])],  # 20 and 150
    }
    assert best_table(survey) == [(1, 1, 3), (33, 64, 0)]


def test_prompts_do_not_count_as_decoding():
    """A step that computes prompts is slow for another reason than its draft length."""
    prefill = Step(
        num_requests=1,
        num_prefill_tokens=500,
        context_tokens=500,
        verified=0,
        drafted=0,
        seconds=9.0,
        proposed_at=(),
        accepted_at=(),
        num_emitted=1,
    )
    survey = {0: [batch(1, [prefill, step(1, 0, 0.1, 1)])], 3: [batch(1, [step(1, 3, 0.5, 3)])]}
    assert best_table(survey) == [(1, 1, 0)]


def test_groups_keep_the_lengths_of_the_policy_on_prompts_with_longer_answers():
    """Siblings share a prompt; a length cut to what a prompt allows would cut off the tail."""
    prompt = np.array([3], np.int32)
    candidates = [
        RolloutRequest(group_id=GroupId(g), index=i, prompt_ids=prompt + g, max_tokens=640, temperature=1.0)
        for g in range(4)
        for i in range(2)
    ]
    lengths_DC = np.array([[20, 30, 100, 120, 400, 500, 700, 640], [25, 28, 90, 130, 420, 480, 600, 640]])
    found = give_group_lengths(candidates, lengths_DC, [60, 20, 500, 300], 2)
    assert [request.max_tokens for request in found] == [60, 20, 500, 300]
    assert [(request.group_id.number, request.index) for request in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [int(request.prompt_ids[0]) for request in found] == [4, 4, 6, 6], "75 % of 90 is near 60, of 600 near 500"


def test_a_rollout_counts_as_equal_if_it_is_in_all_arms():
    arms = {"plain": [[1, 2], [3], [4]], "selector": [[1, 2], [3], [5]], "hindsight": [[1, 2], [9], [4]]}
    group = {name: replace(batch(1), token_ids=tokens) for name, tokens in arms.items()}
    assert equal_rollouts(group) == pytest.approx(1 / 3)


def test_accepted_length_counts_the_bonus_token():
    assert accepted_length(batch(1, [step(4, 3, 0.1, 3), step(4, 0, 0.1, 1)])) == pytest.approx(3.0)


def test_drafter_and_draft_length_can_be_set_and_nothing_else() -> None:
    """A setting that the bench ignores would be believed to have been measured."""
    usual = asked_for(())
    assert (usual.drafter.kind, usual.max_draft_length) == ("dflash", 7)
    assert asked_for((), bench="hosts").drafter.kind == "dflash"
    assert asked_for(("speculation.drafter.kind=eagle3",), bench="hosts").drafter.kind == "eagle3"
    other = asked_for(("speculation.drafter.kind=dflash", "speculation.max_draft_length=10"))
    assert (other.drafter.kind, other.max_draft_length) == ("dflash", 10)
    with pytest.raises(ValueError, match=r"bench rollout: got 'speculation.selector.kind=simple'; must begin with"):
        asked_for(("speculation.selector.kind=simple",))


@pytest.fixture
def rounds() -> list[list[dict[str, SteppedBatch]]]:
    """The selector is slower in the second group, as everything there: only ratios within a group are fair."""
    spec = [step(2, 3, 0.1, 3)]
    seconds = {
        "plain": 30.0,
        "selector": 10.0,
        "hindsight": 9.0,
    }
    first = {
        name: batch(value, spec if name != "plain" else None, [(2, 0.1)] if name == "plain" else None)
        for name, value in seconds.items()
    }
    others = {"selector": 20.0, "simple": 24.0}
    half = {"plain": 15.0, "k=0": 15.5, "best fixed": 6.0, "useless": 15.25}
    many = {"plain": batch(8, step_s=[(2, 0.1)]), "selector": batch(4, spec)}
    return [[first, *({name: batch(value, spec) for name, value in one.items()} for one in (others, half)), many]] * 3


def test_figures_are_ratios_within_a_round(rounds):
    record = Record()
    record.ratios(ratios(rounds))
    figures = record.figures
    assert figures["makespan_speedup"] == pytest.approx(3.0)
    assert figures["of_hindsight"] == pytest.approx(0.9)
    assert figures["best_fixed_speedup"] == pytest.approx(2.5)
    assert figures["over_simple_selector"] == pytest.approx(1.2)
    assert figures["makespan_speedup_64"] == pytest.approx(2.0)
    assert figures["k0_ratio"] == pytest.approx(30 / 31)
    assert figures["useless_drafter_ratio"] == pytest.approx(30 / 30.5)


def test_speedup_by_batch_size_leaves_prompts_out():
    """Plain vLLM reads prompts in some of its steps, and does not say in which: a mean would slow it down."""
    plain = batch(1, step_s=[(16, 0.2), (16, 0.2), (16, 5.0), (1, 0.1)])
    chosen = batch(1, [step(16, 1, 0.4, 2), replace(step(16, 1, 9.0, 2), num_prefill_tokens=30), step(1, 3, 0.1, 4)])
    assert speedup_by_batch([{"plain": plain, "selector": chosen}]) == pytest.approx({"9-16": 1.0, "1-1": 4.0})


class TurnTaking:
    """An engine that notes when it had its turns; one of its steps generates `share` of the batch."""

    def __init__(self, name: str, share: float, turns: list[str]) -> None:
        self.name, self.share, self.turns, self.progress = name, share, turns, 0.0

    def begin(self, order: Order) -> None:
        self.turns.append(f"begin {self.name}")

    def turn(self) -> Turn | SteppedBatch:
        self.turns.append(self.name)
        self.progress += self.share
        if self.progress >= 0.999:
            return batch(len(self.turns))
        return Turn(share=self.progress, num_tokens=0, num_running=1, draft_length=0, seconds=0.0)


def test_arms_take_turns_within_the_batch():
    """Arms that ran one after another would each meet another machine; and the answers must not be mixed up."""
    turns: list[str] = []
    fast, slow = TurnTaking("fast", 0.06, turns), TurnTaking("slow", 0.02, turns)
    order = Order(requests=[])
    done = lockstep([(cast("SteppedEngine", slow), order), (cast("SteppedEngine", fast), order)])
    assert turns[:9] == ["begin slow", "begin fast", *["slow"] * 5, *["fast"] * 2]
    changes = sum(a != b for a, b in pairwise(turns[2:]))
    assert changes >= 15
    assert turns.count("slow") == 50
    finer: list[str] = []
    lockstep([(cast("SteppedEngine", TurnTaking(name, 0.02, finer)), order) for name in ("a", "b")], 0.01)
    assert finer[2:8] == ["a", "b"] * 3, "step by step"
    assert done[0].seconds == turns.index("slow", len(turns) - 1 - turns[::-1].index("slow")) + 1


def test_engines_that_are_alive_at_once_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM refuses to start where less is free than an engine asks for: with the share of one engine each, the second
    one of a bench would not start on one GPU."""
    asked: list[float] = []

    class Started:
        def __init__(self, model_path: Path, config: EngineConfig, **_: object) -> None:
            asked.append(config.gpu_memory_utilization)

        def wait(self) -> None: ...

        def close(self) -> None: ...

    monkeypatch.setattr(stepped, "SteppedEngine", Started)
    with workload.engines(Path("policy"), [None, None, None], seed=0, context=make_context()) as started:
        assert len(started) == 3
    assert sum(asked) == pytest.approx(EngineConfig().gpu_memory_utilization)
