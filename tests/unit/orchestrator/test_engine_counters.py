"""Totals become metrics of a step: differences by engine, rates from sums; an engine that does not answer costs a
count."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from benchmarks.simulated import SimulatedEngine
from paceline.metrics import Metrics
from paceline.orchestrator import engine_counters
from paceline.orchestrator.engine_counters import Differences, ask
from paceline.rollout.counters import (
    ALARM_VERIFICATIONS,
    BIN_S,
    MOST_BINS,
    RECENT_S,
    AcceptanceAlarm,
    DraftCounters,
    Recent,
    Timeline,
)
from paceline.selector.cost import Step
from paceline.types import DraftBin, EngineLostError


def reduced(differences: Differences, totals: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    metrics = Metrics()
    differences.add(totals, metrics)
    return metrics.reduce()


def test_a_step_gets_differences_and_not_totals() -> None:
    differences = Differences()
    reduced(differences, {"a": {"engine/preemptions": 5.0}, "b": {"engine/preemptions": 1.0}})
    step = reduced(differences, {"a": {"engine/preemptions": 7.0}, "b": {"engine/preemptions": 1.0}})
    assert step == {"engine/preemptions": 2.0}


def test_an_engine_that_started_again_counts_from_nothing() -> None:
    differences = Differences()
    reduced(differences, {"a": {"engine/generated_tokens": 900.0}})
    assert reduced(differences, {"a": {"engine/generated_tokens": 30.0}}) == {"engine/generated_tokens": 30.0}


def test_shares_weigh_engines_by_their_counts() -> None:
    """A mean of two engines' hit rates would say 0.5."""
    totals = {
        "a": {"engine/prefix_cache_hits": 0.0, "engine/prefix_cache_queries": 10.0},
        "b": {"engine/prefix_cache_hits": 90.0, "engine/prefix_cache_queries": 90.0},
    }
    assert reduced(Differences(), totals) == {"engine/prefix_cache_hit_share": 0.9}


def test_draft_lengths_are_a_distribution_and_its_mean() -> None:
    totals = {"a": {"selector/steps_at_k0": 1.0, "selector/steps_at_k3": 3.0}, "b": {"selector/steps_at_k0": 2.0}}
    step = reduced(Differences(), totals)
    assert step == {"selector/steps_at_k0": 3.0, "selector/steps_at_k3": 3.0, "selector/draft_length_mean": 1.5}


class Silent(SimulatedEngine):
    async def metrics(self) -> Mapping[str, float]:
        await asyncio.Event().wait()
        raise AssertionError


class Gone(SimulatedEngine):
    async def take_timeline(self) -> Sequence[DraftBin]:
        raise EngineLostError(self.name, "killed")


def test_engines_that_do_not_answer_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_counters, "ASK_DEADLINE_S", 0.01)
    kinds = {"a": SimulatedEngine, "b": Silent, "c": Gone}
    engines = [
        kind(name=name, length_of=lambda request: 1, max_num_seqs=1, seconds_per_token=0.0)
        for name, kind in kinds.items()
    ]
    totals, timelines, num_failed = asyncio.run(ask(engines))
    assert set(totals) == set(timelines) == {"a"}
    assert num_failed == 2


def step(*, drafted: int, seconds: float = 0.1, emitted: int = 6, prefill: int = 0) -> Step:
    return Step(
        num_requests=4,
        num_prefill_tokens=prefill,
        context_tokens=100,
        verified=2,
        drafted=drafted,
        seconds=seconds,
        proposed_at=(4, 4),
        accepted_at=(2, 0),
        num_emitted=emitted,
    )


def test_expectation_is_held_against_what_the_same_steps_brought() -> None:
    counters = DraftCounters(max_draft_length=3)
    counters.add(step(drafted=2), 50.0)
    counters.add(step(drafted=2, seconds=0.3), 100.0)
    counters.add(step(drafted=0, prefill=80), 70.0)  # computes prompts: another kind of step
    counters.add(step(drafted=3), None)  # nothing was expected of it
    found = reduced(Differences(), {"a": counters.totals()})
    assert found["selector/expected_tokens_per_s"] == pytest.approx((50 * 0.1 + 100 * 0.3) / 0.4)
    assert found["selector/measured_tokens_per_s"] == pytest.approx(12 / 0.4)
    assert [found[f"selector/steps_at_k{k}"] for k in range(4)] == [1, 0, 2, 1]


def test_recent_means_forget_what_is_long_past() -> None:
    """A drafter that has died would hide behind the good hours before, and a quiet minute would empty the means."""
    counters, recent = DraftCounters(max_draft_length=3), Recent()
    counters.add(step(drafted=3), 50.0)
    first = recent.means(100.0, counters.totals())
    assert first["selector/draft_length_mean"] == 3
    assert first["rollout/accepted_length"] == 1.5  # 4 verifications, 2 tokens
    assert first["selector/expected_tokens_per_s"] == 50
    counters.add(step(drafted=1, emitted=9), 70.0)
    both = recent.means(100.0 + 0.9 * RECENT_S, counters.totals())
    assert both["selector/draft_length_mean"] == 2 and both["selector/expected_tokens_per_s"] == 60
    counters.add(replace(step(drafted=0), verified=0, proposed_at=(), accepted_at=()), None)
    late = recent.means(100.0 + 9 * RECENT_S, counters.totals())
    assert late == {"selector/draft_length_mean": 0, "rollout/accepted_length": 1}


def test_alarm_is_raised_once_when_acceptance_dies() -> None:
    """A lost drafter costs half the speed and no error; one that is being trained, or slips, is no alarm."""

    def window(alarm: AcceptanceAlarm, accepted: int) -> int:
        """Alarms in a window in which so many of every four verifications accept a token."""
        verified = replace(step(drafted=2), proposed_at=(4, 4), accepted_at=(accepted, 0))
        idle = replace(step(drafted=0), verified=0, proposed_at=(), accepted_at=())
        return sum(alarm.add(part) for _ in range(ALARM_VERIFICATIONS // 4) for part in (verified, idle))

    alarm = AcceptanceAlarm()
    assert [window(alarm, accepted) for accepted in (0, 0, 3, 1, 0, 0, 2, 0)] == [0, 0, 0, 0, 1, 0, 0, 1]
    assert alarm.num_alarms == 2


def test_timeline_is_bounded_and_loses_nothing() -> None:
    timeline = Timeline()
    for number in range(5 * MOST_BINS):
        timeline.add(1000.0 + number * BIN_S, step(drafted=number % 4))
    bins = [DraftBin(*row) for row in timeline.take()]
    assert MOST_BINS / 2 <= len(bins) <= MOST_BINS
    assert sum(item.num_steps for item in bins) == 5 * MOST_BINS
    assert sum(item.num_verifications for item in bins) == 20 * MOST_BINS
    assert all(a.begin_s + a.width_s <= b.begin_s for a, b in pairwise(bins))
    assert bins[0].begin_s <= 1000.0 < bins[0].begin_s + bins[0].width_s
    assert timeline.take() == []
