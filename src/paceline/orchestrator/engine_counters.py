"""Convert counters of engines and learner into metrics of one step.

    engines, learner ── totals ──▶ differences to the last answer ──▶ sums, shares and rates over all engines

Processes send counts, and rates are computed here, so no metric is a mean of means. A missing answer adds one to
`engine/metrics_failed`; the next answer includes its counts.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence

from paceline.metrics import Max, Mean, Metrics, Sum
from paceline.types import DraftBin, Engine, PacelineError

ASK_DEADLINE_S = 10.0
SUMS = (
    "engine/generated_tokens",
    "engine/drafted_tokens",
    "engine/accepted_tokens",
    "engine/preemptions",
    "selector/failures",
    "selector/trace_failures",
    "selector/num_probes",
    "selector/num_switches",
    "selector/num_acceptance_changes",
    "selector/num_refused_steps",
    "history/failures",
    "history/broken_files",
    "history/shared_rollouts",
    "history/merged_rollouts",
    "draft/alarms",
    "draft/restored",
    "draft/restore_failures",
    "draft/hand_over_failures",
    "monitor/positions",
    "monitor/not_finite",
    "monitor/seconds",
    "monitor/failures",
    "learner/restarted",
)
"""Totals with differences that are metrics without further computation."""
SHARES = {
    "engine/prefix_cache_hit_share": ("engine/prefix_cache_hits", "engine/prefix_cache_queries"),
    "selector/expected_tokens_per_s": ("selector/expected_tokens", "selector/predicted_s"),
    "selector/measured_tokens_per_s": ("selector/measured_tokens", "selector/predicted_s"),
    "history/matched_share": ("history/num_matched", "history/num_rows"),
    "monitor/time_share": ("monitor/seconds", "monitor/step_s"),
}
"""Metrics that divide one difference by another, both summed over engines."""
_STEPS_AT = "selector/steps_at_k"


async def ask(engines: Sequence[Engine]) -> tuple[dict[str, Mapping[str, float]], dict[str, Sequence[DraftBin]], int]:
    """Return totals and timelines by engine, and the number of engines that did not answer."""

    async def one(engine: Engine) -> tuple[Mapping[str, float], Sequence[DraftBin]]:
        return await engine.metrics(), await engine.take_timeline()

    answers = await asyncio.gather(
        *(asyncio.wait_for(one(engine), ASK_DEADLINE_S) for engine in engines), return_exceptions=True
    )
    totals: dict[str, Mapping[str, float]] = {}
    timelines: dict[str, Sequence[DraftBin]] = {}
    for engine, answer in zip(engines, answers, strict=True):
        if isinstance(answer, TimeoutError | PacelineError):
            continue  # counted by the caller; the fleet detects lost engines
        if isinstance(answer, BaseException):
            raise answer
        totals[engine.name], timelines[engine.name] = answer
    return totals, timelines, len(engines) - len(totals)


def since(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """Return the counts since the totals `before`. A lower total belongs to a restarted process."""
    return {key: value - start if value >= (start := before.get(key, 0.0)) else value for key, value in now.items()}


class Differences:
    """Differences to the last totals of each process."""

    def __init__(self) -> None:
        self._last: dict[str, Mapping[str, float]] = {}

    def add(self, totals: Mapping[str, Mapping[str, float]], metrics: Metrics) -> None:
        """Add the counts since the last call to a step's metrics; `totals` are by process."""
        step: defaultdict[str, float] = defaultdict(float)
        for who, now in totals.items():
            for key, value in since(self._last.get(who, {}), now).items():
                step[key] += value
            self._last[who] = now
            if "engine/kv_usage_max" in now:
                metrics.add("engine/kv_usage_max", Max(now["engine/kv_usage_max"]))
        for key in SUMS:
            if key in step:
                metrics.add(key, Sum(step[key]))
        for key, (part, whole) in SHARES.items():
            if step.get(whole):
                metrics.add(key, Mean(step[part], step[whole]))
        steps_at = {int(key.removeprefix(_STEPS_AT)): n for key, n in step.items() if key.startswith(_STEPS_AT)}
        for k, num_steps in steps_at.items():
            metrics.add(f"{_STEPS_AT}{k}", Sum(num_steps))
        if sum(steps_at.values()):
            metrics.add(
                "selector/draft_length_mean", Mean(sum(k * n for k, n in steps_at.items()), sum(steps_at.values()))
            )
