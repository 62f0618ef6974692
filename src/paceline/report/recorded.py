"""Read a run's metrics.jsonl into records: steps, rollouts, device use and draft lengths.

Memory is bounded by 8 bytes per metric of a step, and about the size of the details, which long runs record for some
steps only (metrics.py).
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from paceline.metrics import stream_metrics

Floats = npt.NDArray[np.float64]
Interval = tuple[float, float]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepRollouts:
    """Rollouts of one step, one column per field."""

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
    engine: str
    doing: str
    """generate, train, idle or waking."""
    begin_s: float
    """Seconds since the start of the run."""
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSlots:
    step: int
    spans: tuple[SlotSpan, ...]

    def seconds(self, doing: str) -> float:
        return sum(span.end_s - span.begin_s for span in self.spans if span.doing == doing)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepDrafts:
    """Drafts of engines over one step: counts in bins of time (`types.DraftBin`), one column per field."""

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
    """A run up to its last record: finished, still going or crashed."""

    name: str
    started: str
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    steps: tuple[int, ...]
    metrics: Mapping[str, Floats]
    """Metrics over `steps`; NaN for steps without the metric."""
    rollouts: tuple[StepRollouts, ...]
    """Every step of a short run, some steps of a long run."""
    evals: tuple[tuple[int, float], ...]
    """Step and held-out accuracy."""
    eval_intervals: tuple[Interval, ...]
    """Intervals of evaluations; their rollouts are not recorded."""
    texts: tuple[Mapping[str, Any], ...]
    """Answers of the first and the last evaluation that recorded any: `step`, and `texts` with rewards."""
    events: tuple[Mapping[str, Any], ...]
    places: tuple[StepSlots, ...]
    """Uses of engines' devices, in runs that train their drafter."""
    drafts: tuple[StepDrafts, ...]
    """Draft lengths over time, in runs that speculate."""
    mismatches: tuple[Mapping[str, Any], ...]
    """Comparisons of engines and learner: `step`, `counts` of log-ratios, k3 of `engines`."""
    duration_s: float

    @property
    def planned_steps(self) -> int | None:
        return self.config.get("run", {}).get("steps")

    def series(self, key: str) -> Floats:
        """Return a metric over the steps; NaN for steps without it."""
        found = self.metrics.get(key)
        return np.full(len(self.steps), np.nan) if found is None else found.copy()

    def whole_phases(self) -> tuple[StepRollouts, ...]:
        """Return steps with a complete record of every engine. In asynchronous training this includes the steps around,
        because their rollouts were in flight too."""
        age = self.config.get("run", {}).get("max_age", 0)
        missing = set(self.steps) - {batch.step for batch in self.rollouts}
        return tuple(
            batch for batch in self.rollouts if missing.isdisjoint(range(batch.step - age, batch.step + age + 1))
        )


def ends(items: Sequence[T]) -> tuple[Sequence[T], Sequence[T]]:
    """Return the first and the last few items, without overlap: a single item has no last items."""
    size = max(1, min(5, len(items) // 2))
    return items[:size], items[size:][-size:]


def read_run(run_dir: Path) -> RecordedRun:
    """Read run_dir/metrics.jsonl; raise ValueError if it has no finished step yet."""
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(
            f"run: got {run_dir}, which has no metrics.jsonl; must be a run's directory, such as runs/NAME of "
            "`paceline train`"
        )
    found = _Reader()
    for kind, record in stream_metrics(path):
        found.add(kind, record)
    if not found.rows:
        raise ValueError(
            f"run: {path} holds no finished step yet; wait for the first one, or check the run's output if it stopped"
        )
    steps = sorted(found.rows)
    order = [found.rows[step] for step in steps]
    return RecordedRun(
        name=run_dir.resolve().name,
        started=found.started,
        config=found.head.get("config", {}),
        environment=found.head.get("environment", {}),
        steps=tuple(steps),
        metrics={key: np.frombuffer(column)[order] for key, column in found.columns().items()},
        rollouts=tuple(found.rollouts[step] for step in sorted(found.rollouts)),
        evals=tuple(found.evals),
        eval_intervals=tuple(zip(found.eval_begins, found.eval_ends, strict=False)),  # the last may be unfinished
        texts=tuple(found.texts),
        events=tuple(found.events),
        places=tuple(found.places[step] for step in sorted(found.places)),
        mismatches=tuple(found.mismatches.values()),
        drafts=tuple(found.drafts),
        duration_s=found.duration_s,
    )


@dataclass(slots=True)
class _Reader:
    """Records read so far. The last record of a step wins."""

    started: str = ""
    head: Mapping[str, Any] = field(default_factory=dict)
    rows: dict[int, int] = field(default_factory=dict)
    """Row of each step in the columns."""
    rollouts: dict[int, StepRollouts] = field(default_factory=dict)
    places: dict[int, StepSlots] = field(default_factory=dict)
    mismatches: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    drafts: list[StepDrafts] = field(default_factory=list)
    events: list[Mapping[str, Any]] = field(default_factory=list)
    texts: list[Mapping[str, Any]] = field(default_factory=list)
    evals: list[tuple[int, float]] = field(default_factory=list)
    eval_begins: list[float] = field(default_factory=list)
    eval_ends: list[float] = field(default_factory=list)
    duration_s: float = 0.0
    _columns: dict[str, array[float]] = field(default_factory=dict)
    _num_rows: int = 0

    def add(self, kind: str, record: dict[str, Any]) -> None:
        if kind in ("stage", "step", "eval", "event"):
            self.duration_s = max(self.duration_s, record["time_s"])
        match kind:
            case "run":  # repeated by every resume
                self.started = self.started or str(record.get("started", ""))
                self.head = record
            case "stage" if record["stage"] == "eval":
                self.eval_begins.append(record["time_s"])
            case "step":
                self._add_step(record["step"], record["metrics"])
            case "rollouts" if record["length"]:
                self.rollouts[record["step"]] = _columns(record)
            case "eval":
                self.evals.append((record["step"], record["metrics"]["eval/accuracy"]))
                self.eval_ends.append(record["time_s"])
            case "event":
                self.events.append(record)
            case "texts":
                self.texts = [*self.texts[:1], record]
            case "places":
                if (places := _places(record)).spans:
                    self.places[record["step"]] = places
            case "mismatch":
                engines = {sys.intern(name): k3 for name, k3 in record["engines"].items()}
                counts = np.array(record["counts"], dtype=np.int64)
                self.mismatches[record["step"]] = {"step": record["step"], "counts": counts, "engines": engines}
            case "draft_length":
                self.drafts.append(_drafts(record))

    def columns(self) -> dict[str, array[float]]:
        """Return metrics by row, all of the same length."""
        for column in self._columns.values():
            column.extend([np.nan] * (self._num_rows - len(column)))
        return self._columns

    def _add_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.rows[step] = self._num_rows
        for key, value in metrics.items():
            column = self._columns.setdefault(key, array("d"))
            column.extend([np.nan] * (self._num_rows - len(column)))
            column.append(value)
        self._num_rows += 1


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
