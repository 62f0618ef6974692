"""Summarize a run: headline figures, the tail of its generation, and its failures.

The tail is the time of a generation phase in which some engine is idle. With intervals of time as sets,

    idle(engine) = phases that the engine took part in  -  its rollouts in flight  -  evaluations
    tail         = union of idle(engine) over engines

    tail share   = |tail| / |phases|                           share of time with an idle engine
    idle share   = sum |idle(engine)| / sum |engine's phases|  share of engine time lost

Shares divide sums of seconds over the whole run. A mean over steps would weigh a short step like a long one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import numpy.typing as npt

from paceline.context import duration
from paceline.metrics import PER_STEP, SINCE_START
from paceline.monitor import TESTS, limit_log10
from paceline.report.recorded import Floats, Interval, RecordedRun, StepRollouts, ends, read_run

# Sets of time: sorted disjoint intervals.


def union(intervals: Iterable[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > start:
            merged.append((start, end))
    return merged


def subtract(whole: Sequence[Interval], parts: Iterable[Interval]) -> list[Interval]:
    rest = list(whole)
    for start, end in parts:
        rest = [piece for a, b in rest for piece in ((a, min(b, start)), (max(a, end), b)) if piece[1] > piece[0]]
    return rest


def clip(intervals: Iterable[Interval], within: Interval) -> list[Interval]:
    return [(max(a, within[0]), min(b, within[1])) for a, b in intervals if min(b, within[1]) > max(a, within[0])]


def seconds(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    idle: Mapping[str, Sequence[Interval]]
    """By engine."""
    tail: Sequence[Interval]
    idle_share: float
    tail_share: float


def occupancy(
    batches: Sequence[StepRollouts],
    *,
    phases: Sequence[StepRollouts] | None = None,
    within: Interval | None = None,
    evals: Sequence[Interval] = (),
) -> Occupancy:
    """Return occupancy over the generation phases of these steps or of `phases`, or over the part `within`. Phases of
    successive steps overlap in asynchronous runs; as sets they count once, and rollouts of the next step keep an engine
    busy too."""
    available: dict[str, list[Interval]] = defaultdict(list)
    for batch in batches if phases is None else phases:
        for engine in batch.engines:
            available[engine].append(batch.window)
    busy = _busy(batches)
    if within is not None:
        available = defaultdict(list, {engine: clip(phases, within) for engine, phases in available.items()})
    present = {engine: subtract(union(phases), evals) for engine, phases in available.items()}
    idle = {engine: _gaps(intervals, busy.get(engine, [])) for engine, intervals in present.items()}
    tail = union(interval for intervals in idle.values() for interval in intervals)
    anyone = union(interval for intervals in present.values() for interval in intervals)
    engine_s = sum(seconds(intervals) for intervals in present.values())
    idle_s = sum(seconds(intervals) for intervals in idle.values())
    return Occupancy(
        idle=idle,
        tail=tail,
        idle_share=idle_s / engine_s if engine_s else 0.0,
        tail_share=seconds(tail) / seconds(anyone) if anyone else 0.0,
    )


def _busy(batches: Sequence[StepRollouts]) -> dict[str, list[Interval]]:
    """Return the intervals in which each engine had rollouts: a fast `union` for long runs."""
    parts: dict[str, list[tuple[Floats, Floats]]] = defaultdict(list)
    for batch in batches:
        for index, engine in enumerate(batch.engines):
            own = batch.engine == index
            parts[engine].append((batch.start_s[own], batch.end_s[own]))
    busy: dict[str, list[Interval]] = {}
    for engine, columns in parts.items():
        start_s, end_s = (np.concatenate(column) for column in zip(*columns, strict=True))
        order = np.argsort(start_s, kind="stable")
        start_s, end_s = start_s[order], np.maximum.accumulate(end_s[order])
        first = np.append(True, start_s[1:] > end_s[:-1])[: len(start_s)]
        last = np.append(first[1:], True)[: len(start_s)]
        busy[engine] = [(a, b) for a, b in zip(start_s[first].tolist(), end_s[last].tolist(), strict=True) if b > a]
    return busy


def _gaps(phases: Sequence[Interval], busy: Sequence[Interval]) -> list[Interval]:
    """Like `subtract`, in linear time for many busy intervals: each phase reads only the ones that touch it."""
    starts = np.array([start for start, _ in busy])
    ends = np.array([end for _, end in busy])
    gaps: list[Interval] = []
    for phase in phases:
        first, last = np.searchsorted(ends, phase[0], side="right"), np.searchsorted(starts, phase[1], side="left")
        gaps += subtract([phase], busy[int(first) : int(last)])
    return gaps


def in_flight(
    batches: Sequence[StepRollouts], within: Interval, engine: str | None = None
) -> tuple[Floats, npt.NDArray[np.int64]]:
    """Return edges of time, and between them the number of rollouts in flight, on one engine or on all."""
    times, changes = [np.array(within)], [np.zeros(2, dtype=np.int64)]
    for batch in batches:
        chosen = batch.start_s < within[1]
        chosen &= batch.end_s > within[0]
        if engine is not None:
            if engine not in batch.engines:
                continue
            chosen &= batch.engine == batch.engines.index(engine)
        count = int(chosen.sum())
        times += [batch.start_s[chosen].clip(*within), batch.end_s[chosen].clip(*within)]
        changes += [np.ones(count, dtype=np.int64), np.full(count, -1, dtype=np.int64)]
    edges, where = np.unique(np.concatenate(times), return_inverse=True)
    steps = np.zeros(len(edges), dtype=np.int64)
    np.add.at(steps, where, np.concatenate(changes))
    return edges, np.cumsum(steps)[:-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    label: str
    value: str
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """Headline figures of a run. None for figures that need unrecorded data."""

    num_steps: int
    planned_steps: int | None
    duration_s: float
    accuracy_start: float | None
    accuracy_end: float | None
    """None before the second evaluation."""
    reward_start: float | None
    """Over all rollouts of the first few steps."""
    reward_end: float | None
    """None before the second step."""
    tokens_per_s: float | None
    """Median over steps."""
    step_s: float | None
    """Median over steps."""
    generation_share: float | None
    idle_share: float | None
    tail_share: float | None
    truncated_share: float | None
    """Over all rollouts."""
    num_engines_lost: int
    num_redispatched: int
    num_alarms: int
    evidence_log10: float | None
    """Highest evidence of the losslessness monitor; None if nothing was tested."""
    num_examined: float

    def headlines(self) -> list[Headline]:
        whole = self.planned_steps in (None, self.num_steps)
        rows = (
            ("Held-out accuracy", _change(self.accuracy_start, self.accuracy_end), "first and last evaluation"),
            ("Reward", _change(self.reward_start, self.reward_end), "mean of the first and last steps"),
            (
                "Steps",
                f"{self.num_steps}" if whole else f"{self.num_steps} of {self.planned_steps}",
                f"in {duration(self.duration_s)}",
            ),
            (
                "Time per step",
                number(self.step_s, "{:.1f} s"),
                f"median; {percent(self.generation_share)} of it generation",
            ),
            ("Generation speed", number(self.tokens_per_s, "{:,.0f} tokens/s"), "median over steps"),
            ("Idle engine time", percent(self.idle_share), f"tail: {percent(self.tail_share)} of generation"),
            ("Truncated rollouts", percent(self.truncated_share), "cut off at max_tokens"),
            ("Engines lost", f"{self.num_engines_lost}", f"{self.num_redispatched} rollouts dispatched again"),
            (
                "Losslessness alarms",
                "n/a" if self.evidence_log10 is None else f"{self.num_alarms}",
                f"{self.num_examined:,.0f} verified tokens examined; evidence up to "
                f"{number(self.evidence_log10, '10^{:.1f}')}, an alarm needs 10^{limit_log10(1):.1f}",
            ),
        )
        return [Headline(label=label, value=value, note=note) for label, value, note in rows]


def summary(run: Path | RecordedRun) -> RunSummary:
    run = read_run(run) if isinstance(run, Path) else run
    first, last = ends(run.rollouts)
    phases = run.whole_phases()
    whole = occupancy(run.rollouts, phases=phases, evals=run.eval_intervals) if phases else None
    step_s, generation_s = run.series("time/step"), run.series("time/generation")
    lost = [event for event in run.events if event["what"] == "engine_lost"]
    evidence = [log10 for test in TESTS for log10 in run.series(f"monitor/{test}_log10").tolist() if np.isfinite(log10)]
    return RunSummary(
        num_steps=len(run.steps),
        planned_steps=run.planned_steps,
        duration_s=run.duration_s,
        accuracy_start=run.evals[0][1] if run.evals else None,
        accuracy_end=run.evals[-1][1] if len(run.evals) > 1 else None,
        reward_start=reward_of(first),
        reward_end=reward_of(last),
        tokens_per_s=middle_of(run.series("rollout/tokens_per_s")),
        step_s=middle_of(step_s),
        generation_share=float(np.nansum(generation_s) / np.nansum(step_s)) if np.nansum(step_s) > 0 else None,
        idle_share=whole.idle_share if whole else None,
        tail_share=whole.tail_share if whole else None,
        truncated_share=truncated_of(run, run.rollouts),
        num_engines_lost=len(lost),
        num_redispatched=sum(int(event.get("redispatched", 0)) for event in lost),
        num_alarms=sum(event["what"] == "monitor_alarm" for event in run.events),
        evidence_log10=max(evidence) if evidence else None,
        num_examined=float(np.nansum(run.series("monitor/positions"))),
    )


def reward_of(batches: Sequence[StepRollouts]) -> float | None:
    rewards = np.concatenate([batch.reward for batch in batches]) if batches else np.empty(0)
    known = rewards[~np.isnan(rewards)]  # NaN for failed reward functions
    return float(known.mean()) if len(known) else None


def truncated_of(run: RecordedRun, batches: Sequence[StepRollouts]) -> float | None:
    """Return the share of truncated rollouts, each step weighted by its rollouts."""
    shares = dict(zip(run.steps, run.series("rollout/truncated_share").tolist(), strict=True))
    known = [batch for batch in batches if np.isfinite(shares.get(batch.step, np.nan))]
    counts = [len(batch.length) for batch in known]
    return float(np.average([shares[batch.step] for batch in known], weights=counts)) if known else None


def middle_of(values: Sequence[float] | Floats) -> float | None:
    finite = np.asarray(values, dtype=np.float64)
    finite = finite[np.isfinite(finite)].tolist()
    return median(finite) if finite else None


def steps_words(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"


def smooth(values: Floats, size: int = 5) -> Floats:
    """Return a centered mean that ignores NaN and shrinks at the ends."""
    half = size // 2
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return np.array([np.nan if np.isnan(window).all() else np.nanmean(window) for window in windows])


def moved(start: float | None, end: float | None) -> str:
    if start is None:
        return "was not recorded"
    if end is None:
        return f"is {start:.2f} so far"
    if abs(end - start) < 0.005:
        return f"stayed at {end:.2f}"
    return f"{'rose' if end > start else 'fell'} from {start:.2f} to {end:.2f}"


def percent(share: float | None) -> str:
    if share is None:
        return "n/a"
    return f"{100 * share:.1f} %" if 0 < share < 0.095 else f"{100 * share:.0f} %"


def number(value: float | None, form: str) -> str:
    return "n/a" if value is None else form.format(value)


def _change(start: float | None, end: float | None) -> str:
    return number(start, "{:.3f}") + ("" if end is None else f" → {end:.3f}")


# Failures.


def failure_rows(run: RecordedRun) -> list[tuple[str, str]]:
    """Return failures that did not end the run, with their counts."""
    totals = {key: float(np.nansum(run.series(key))) for key in PER_STEP}
    totals |= {key: float(np.nan_to_num(run.series(key)).max()) for key in SINCE_START}
    meaning = PER_STEP | SINCE_START
    return [(key, f"{total:,.0f}: {meaning[key]}") for key, total in totals.items() if total > 0]
