"""A run's metrics.jsonl as records: its steps, rollouts, device use and draft lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.metrics import read_metrics

Floats = npt.NDArray[np.float64]
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepRollouts:
    """The rollouts of one step, a column a field."""

    step: int
    engines: tuple[str, ...]
    engine: npt.NDArray[np.int64]
    """Index into `engines`."""
    start_s: Floats
    """Seconds since the start of the run."""
    end_s: Floats
    length: npt.NDArray[np.int64]
    reward: Floats

    @property
    def window(self) -> Interval:
        return float(self.start_s.min()), float(self.end_s.max())


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotSpan:
    """What an engine's device was used for, from when to when."""

    engine: str
    doing: str
    """generate, train, idle or waking."""
    begin_s: float
    """Seconds since the start of the run."""
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSlots:
    """What all engines' devices were used for in one step."""

    step: int
    spans: tuple[SlotSpan, ...]

    def seconds(self, doing: str) -> float:
        return sum(span.end_s - span.begin_s for span in self.spans if span.doing == doing)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepDrafts:
    """What engines drafted over the time of one step, a column a field: counts in bins of time (`types.DraftBin`)."""

    step: int
    engines: tuple[str, ...]
    engine: npt.NDArray[np.int64]
    """Index into `engines`."""
    begin_s: Floats
    """Seconds since the start of the run."""
    width_s: Floats
    num_steps: Floats
    draft_length: Floats
    """Sum over the engine's steps in the bin."""
    num_verifications: Floats
    num_accepted: Floats
    num_requests: Floats
    """Sum over the engine's steps in the bin."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedRun:
    """A run as far as it has been recorded: finished, still going, or cut off by a crash."""

    name: str
    started: str
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    steps: tuple[int, ...]
    metrics: tuple[Mapping[str, float], ...]
    """Metrics of each step in `steps`."""
    rollouts: tuple[StepRollouts, ...]
    evals: tuple[tuple[int, float], ...]
    """Step and held-out accuracy."""
    eval_intervals: tuple[Interval, ...]
    """When engines sampled for an evaluation, whose rollouts are not recorded."""
    texts: tuple[Mapping[str, Any], ...]
    """One for each evaluation whose answers were recorded: its step, and `texts` with their prompts and rewards."""
    events: tuple[Mapping[str, Any], ...]
    places: tuple[StepSlots, ...]
    """What engines' devices were used for, in runs that train their drafter."""
    drafts: tuple[StepDrafts, ...]
    """Draft lengths over time, in runs that speculate."""
    mismatches: tuple[Mapping[str, Any], ...]
    """One for each step that compared engines and learner: `counts` of log-ratios, k3 of `engines`, `worst` tokens."""
    duration_s: float

    @property
    def planned_steps(self) -> int | None:
        return self.config.get("run", {}).get("steps")

    def series(self, key: str) -> Floats:
        """One metric over the steps; NaN where a step does not have it."""
        return np.array([metrics.get(key, np.nan) for metrics in self.metrics], dtype=np.float64)

    def first_and_last(self) -> tuple[tuple[StepRollouts, ...], tuple[StepRollouts, ...]]:
        """The first and the last few steps, to be compared; they do not overlap, so a run of one step has no last
        ones."""
        size = max(1, min(5, len(self.rollouts) // 2))
        return self.rollouts[:size], self.rollouts[size:][-size:]


def read_run(run_dir: Path) -> RecordedRun:
    """Read run_dir/metrics.jsonl; a ValueError says what to do when there is nothing to tell yet."""
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(
            f"run: got {run_dir}, which has no metrics.jsonl; must be a run's directory, such as runs/NAME of "
            "`paceline train`"
        )
    records = read_metrics(path)
    steps = {record["step"]: record for record in records.get("step", [])}
    if not steps:
        raise ValueError(
            f"run: {path} holds no finished step yet; wait for the first one, or look at the run's output for why it "
            "stopped"
        )
    head = records.get("run", [{}])[0]
    batches = {record["step"]: record for record in records.get("rollouts", []) if record["length"]}
    places = {record["step"]: _places(record) for record in records.get("places", [])}
    everything = [record["time_s"] for kind in ("stage", "step", "eval", "event") for record in records.get(kind, [])]
    return RecordedRun(
        name=run_dir.resolve().name,
        started=str(head.get("started", "")),
        config=head.get("config", {}),
        environment=head.get("environment", {}),
        steps=tuple(sorted(steps)),
        metrics=tuple(steps[step]["metrics"] for step in sorted(steps)),
        rollouts=tuple(_columns(batches[step]) for step in sorted(batches)),
        evals=tuple((record["step"], record["metrics"]["eval/accuracy"]) for record in records.get("eval", [])),
        eval_intervals=_eval_intervals(records.get("stage", []), records.get("eval", [])),
        texts=tuple(records.get("texts", [])),
        events=tuple(records.get("event", [])),
        places=tuple(places[step] for step in sorted(places) if places[step].spans),
        mismatches=tuple({record["step"]: record for record in records.get("mismatch", [])}.values()),
        drafts=tuple(_drafts(record) for record in records.get("draft_length", [])),
        duration_s=max(everything),
    )


def _columns(record: Mapping[str, Any]) -> StepRollouts:
    return StepRollouts(
        step=record["step"],
        engines=tuple(record["engines"]),
        engine=np.array(record["engine"], dtype=np.int64),
        start_s=np.array(record["start_s"], dtype=np.float64),
        end_s=np.array(record["end_s"], dtype=np.float64),
        length=np.array(record["length"], dtype=np.int64),
        reward=np.array(record["reward"], dtype=np.float64),
    )


def _drafts(record: Mapping[str, Any]) -> StepDrafts:
    columns = ("begin_s", "width_s", "num_steps", "draft_length", "num_verifications", "num_accepted", "num_requests")
    return StepDrafts(
        step=record["step"],
        engines=tuple(record["engines"]),
        engine=np.array(record["engine"], dtype=np.int64),
        **{name: np.array(record[name], dtype=np.float64) for name in columns},
    )


def _places(record: Mapping[str, Any]) -> StepSlots:
    spans = (
        SlotSpan(engine=name, doing=doing, begin_s=begin, end_s=end)
        for name, doing, begin, end in record["spans"]
        if end > begin
    )
    return StepSlots(step=record["step"], spans=tuple(spans))


def _eval_intervals(stages: Sequence[Mapping[str, Any]], evals: Sequence[Mapping[str, Any]]) -> tuple[Interval, ...]:
    begins = [stage["time_s"] for stage in stages if stage["stage"] == "eval"]
    return tuple(
        (begin, record["time_s"]) for begin, record in zip(begins, evals, strict=False)
    )  # the last may have no end
