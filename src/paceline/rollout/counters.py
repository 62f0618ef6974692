"""Counters of an engine: vLLM's statistics of every step, and results of the chosen draft lengths.

All are totals since the engine's start, so a lost answer loses nothing. Readers compute rates and shares from
differences (`orchestrator/engine_counters.py`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

from paceline.rollout.internals import stats

if TYPE_CHECKING:
    from vllm.v1.metrics.stats import IterationStats, SchedulerStats

    from paceline.selector.cost import Step

BIN_S = 0.25
MOST_BINS = 256
RECENT_S = 10.0
ALARM_VERIFICATIONS = 256
ALIVE, DEAD = 0.2, 0.05
"""Accepted tokens per verification above which a drafter counts as alive, and below which as dead."""
_STEPS_AT = "selector/steps_at_k"


class EngineCounters:
    """Sums of vLLM's statistics. As vLLM's stat logger it sees tokens that FINAL_ONLY hides from us."""

    def __init__(self) -> None:
        self._heard_s = time.monotonic()
        self._totals: dict[str, float] = dict.fromkeys(stats.TOTALS, 0.0)
        self._now: dict[str, float] = dict.fromkeys(stats.GAUGES, 0.0)
        self._kv_usage_max = 0.0

    def touch(self) -> None:
        """Restart the wait for the next token."""
        self._heard_s = time.monotonic()

    def silent_s(self) -> float:
        return time.monotonic() - self._heard_s

    def read(self) -> dict[str, float]:
        """Return totals and gauges by metric key; `engine/kv_usage_max` is the maximum since the last call."""
        highest, self._kv_usage_max = max(self._kv_usage_max, self._now["kv_usage"]), self._now["kv_usage"]
        values = self._totals | self._now | {"kv_usage_max": highest}
        return {f"engine/{key}": value for key, value in values.items()}

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: object = None,
        engine_idx: int = 0,
    ) -> None:
        counted = stats.totals(scheduler_stats, iteration_stats)
        if counted.get("generated_tokens"):
            self.touch()
        for key, value in counted.items():
            self._totals[key] += value
        if scheduler_stats is not None:
            self._now = stats.gauges(scheduler_stats)
            self._kv_usage_max = max(self._kv_usage_max, self._now["kv_usage"])

    def log(self) -> None:
        """Do nothing: `read` returns the numbers."""

    def log_engine_initialized(self) -> None:
        """Do nothing: vLLM requires the method."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """Do nothing: vLLM requires the method."""


class DraftCounters:
    """Draft lengths of a scheduler's steps, with expected and measured results."""

    def __init__(self, max_draft_length: int) -> None:
        self._steps_at = [0] * (max_draft_length + 1)
        self._step_s = self._predicted_s = self._expected_tokens = self._measured_tokens = 0.0
        self._verifications = self._accepted = 0

    def add(self, step: Step, expected_rate: float | None) -> None:
        """Count a step. `expected_rate` is the selector's prediction for its verified draft length, in tokens per
        second."""
        self._steps_at[min(step.drafted, len(self._steps_at) - 1)] += 1
        self._step_s += step.seconds
        self._verifications += step.num_verifications
        self._accepted += step.num_accepted
        # The selector predicts steps without prefill only.
        if expected_rate is not None and not step.num_prefill_tokens:
            self._predicted_s += step.seconds
            self._expected_tokens += expected_rate * step.seconds
            self._measured_tokens += step.num_emitted

    def totals(self) -> dict[str, float]:
        return {f"{_STEPS_AT}{k}": float(steps) for k, steps in enumerate(self._steps_at)} | {
            "selector/step_s": self._step_s,
            "selector/predicted_s": self._predicted_s,
            "selector/expected_tokens": self._expected_tokens,
            "selector/measured_tokens": self._measured_tokens,
            "selector/verifications": float(self._verifications),
            "selector/accepted_tokens": float(self._accepted),
        }


class Recent:
    """Means over the last seconds, from totals, for readers without training steps."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, Mapping[str, float]]] = deque([(float("-inf"), {})])

    def means(self, now_s: float, totals: Mapping[str, float]) -> dict[str, float]:
        """Return means over the last RECENT_S, under the keys of metrics.jsonl."""
        self._seen.append((now_s, totals))
        while self._seen[1][0] <= now_s - RECENT_S:
            self._seen.popleft()
        before = self._seen[0][1]
        new = {key: value - before.get(key, 0.0) for key, value in totals.items()}
        steps_at = {int(key.removeprefix(_STEPS_AT)): n for key, n in new.items() if key.startswith(_STEPS_AT)}
        predicted_s, verifications = new["selector/predicted_s"], new["selector/verifications"]
        parts = {
            "selector/draft_length_mean": (sum(k * n for k, n in steps_at.items()), sum(steps_at.values())),
            "selector/expected_tokens_per_s": (new["selector/expected_tokens"], predicted_s),
            "selector/measured_tokens_per_s": (new["selector/measured_tokens"], predicted_s),
            "rollout/accepted_length": (new["selector/accepted_tokens"] + verifications, verifications),
        }
        without_drafts = {"rollout/accepted_length": 1.0}
        return without_drafts | {key: part / whole for key, (part, whole) in parts.items() if whole}


class AcceptanceAlarm:
    """Detects a sudden drop of acceptance, once. A drafter that was never accepted raises no alarm: it may be in
    training."""

    def __init__(self) -> None:
        self.num_alarms = 0
        self._alive = False
        self._verifications = self._accepted = 0

    def add(self, step: Step) -> bool:
        """Return whether this step raises the alarm."""
        self._verifications += step.num_verifications
        self._accepted += step.num_accepted
        if self._verifications < ALARM_VERIFICATIONS:
            return False
        rate = self._accepted / self._verifications
        self._verifications = self._accepted = 0
        died = self._alive and rate < DEAD
        self._alive = rate >= ALIVE or (self._alive and not died)
        self.num_alarms += died
        return died


class Timeline:
    """Draft length, acceptance and batch size in a bounded number of time bins: too many are merged in pairs."""

    def __init__(self) -> None:
        self._width_s = BIN_S
        self._bins: dict[int, list[float]] = {}

    def add(self, now_s: float, step: Step) -> None:
        """Add a step. `now_s` is on the machine's monotonic clock, as the times of rollouts."""
        new = (1, step.drafted, step.num_verifications, step.num_accepted, step.num_requests)
        self._merge(self._bins, int(now_s // self._width_s), new)
        if len(self._bins) > MOST_BINS:
            wider: dict[int, list[float]] = {}
            for number, row in self._bins.items():
                self._merge(wider, number // 2, row)
            self._bins, self._width_s = wider, 2 * self._width_s

    def take(self) -> list[list[float]]:
        """Return and clear the rows since the last call, in the order of `types.DraftBin`'s fields."""
        rows = [[number * self._width_s, self._width_s, *row] for number, row in sorted(self._bins.items())]
        self._bins, self._width_s = {}, BIN_S
        return rows

    @staticmethod
    def _merge(bins: dict[int, list[float]], number: int, row: tuple[float, ...] | list[float]) -> None:
        bins[number] = [a + b for a, b in zip(bins.get(number, [0.0] * len(row)), row, strict=True)]
