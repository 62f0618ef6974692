"""Metric values that know how to reduce, and the sinks that receive them.

Workers send counts (`Mean(total, count)`) and readers compute rates, which rules out a mean of means. Keys are paths
such as `rollout/accepted_length`. `metrics.jsonl` is always written; console, report and trackers use the same records.

Metrics are kept for every step. Details (`DETAILS`) grow with the batch and the fleet, to gigabytes after some thousand
steps. When they exceed `DETAIL_BYTES`, details of intermediate steps are dropped until half of that is left.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Protocol, Self

from paceline.files import atomic_file, read_jsonl

DETAILS = ("rollouts", "draft_length", "mismatch", "monitor", "places", "texts")
"""Kinds of records that long runs do not keep for every step."""
DETAIL_BYTES = 64 * 2**20
_BLOCK_STEPS = 8
"""Consecutive steps to keep or drop together: in asynchronous training, generation spans several steps."""
_DETAIL_LINE = re.compile(rb'\{"kind": "(?:%s)", "step": (\d+),' % "|".join(DETAILS).encode())

PER_STEP = {
    "selector/failures": "the selector raised an exception; the step ran without drafts",
    "selector/trace_failures": "the scheduler could not write its trace",
    "history/failures": "the history drafter raised an exception; the step ran without drafts",
    "history/broken_files": "could not read rollouts of another engine",
    "draft/alarms": "acceptance dropped suddenly: the drafter may be broken",
    "draft/restored": "a worker's drafter lost weights in a reload or during sleep; they were restored",
    "draft/restore_failures": "could not keep or restore a drafter's weights",
    "draft/hand_over_failures": "could not write hidden states for drafter training",
    "draft/failures": "drafter training failed; it continued at the next step, or ended",
    "monitor/alarms": "an engine's tokens or log-probabilities are not the policy's; the engine drafts no more",
    "monitor/failures": "the losslessness monitor raised an exception, or could not stop an engine's drafts",
    "engine/lost": "an engine was lost; other engines took its rollouts",
    "learner/restarted": "the learner was lost; it was restarted from its state",
    "rollout/quarantined_groups": "a group was dropped because its prompt may crash engines",
    "engine/preemptions": "requests were preempted for lack of KV cache and recomputed",
    "engine/metrics_failed": "an engine did not report its counters in time",
    "sync/failed": "an engine did not accept a weight push",
    "sync/refused": "a push was refused before it changed the model",
    "checkpoint/failed": "could not write a checkpoint or data for a resumed run",
}
"""Metrics that count failures per step, with their meaning."""
SINCE_START = {
    "reward/failures": "the reward function raised an exception, timed out, exited or returned no finite number",
    "draft/broken_buffer_files": "could not read files of drafter training",
    "draft/checkpoints_failed": "could not write checkpoints of the drafter",
    "metrics/sink_errors": "records that a sink did not accept",
    "metrics/records_lost": "records that could not be written to metrics.jsonl",
}
"""Metrics that count failures since the start of the run, with their meaning."""


class Metric(Protocol):
    """A value that can be merged with another of its kind and read as a number."""

    def merge(self, other: Self) -> Self: ...

    def value(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Mean:
    total: float
    count: float = 1.0

    def merge(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    def value(self) -> float:
        return self.total / self.count if self.count else float("nan")

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        return cls(float(sum(values)), float(len(values)))

    @classmethod
    def of_known(cls, values: Sequence[float]) -> Mean:
        """Return the mean without NaNs."""
        return cls.of([value for value in values if not math.isnan(value)])


@dataclass(frozen=True, slots=True)
class Sum:
    total: float

    def merge(self, other: Sum) -> Sum:
        return Sum(self.total + other.total)

    def value(self) -> float:
        return self.total


@dataclass(frozen=True, slots=True)
class Max:
    maximum: float

    def merge(self, other: Max) -> Max:
        # max() drops a NaN in second place; a NaN must stay visible in any order.
        return other if math.isnan(other.maximum) else Max(max(self.maximum, other.maximum))

    def value(self) -> float:
        return self.maximum


class Metrics:
    """Metrics of one step under their keys; adding to a key merges."""

    def __init__(self) -> None:
        self._values: dict[str, Metric] = {}

    def add(self, key: str, metric: Metric) -> None:
        known = self._values.get(key)
        # Merging a Sum with a Mean would silently give a wrong number.
        assert known is None or type(known) is type(metric), (
            f"{key}: {type(known).__name__} merged with {type(metric).__name__}"
        )
        self._values[key] = metric if known is None else known.merge(metric)

    def add_means(self, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            self.add(key, Mean(value))

    def reduce(self) -> dict[str, float]:
        return {key: metric.value() for key, metric in sorted(self._values.items())}


class Sink(Protocol):
    """Consumer of records. `kind` is "run", "stage", "step", "rollouts", "draft_length", "mismatch", "places", "eval",
    "texts", "event" or "progress"."""

    def write(self, kind: str, record: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class JsonlSink:
    """Write metrics.jsonl, unbuffered, so that a crash loses no record."""

    def __init__(self, path: Path, *, detail_bytes: int = DETAIL_BYTES) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_cut_line(path)
        self._path = path
        self._detail_bytes = self._thin_at = detail_bytes
        self._num_bytes = sum(_detail_sizes(path).values()) if path.is_file() else 0
        self._file = self._open()

    def write(self, kind: str, record: Mapping[str, Any]) -> None:
        """Append one line; remove a partial line before raising an error."""
        assert "kind" not in record, "the kind of a record is not one of its fields"
        line = memoryview((json.dumps({"kind": kind, **record}, allow_nan=True) + "\n").encode())
        num_bytes, length = len(line), os.fstat(self._file.fileno()).st_size
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError:
            self._file.truncate(length)
            raise
        if kind in DETAILS:
            self._num_bytes += num_bytes
            if self._num_bytes > self._thin_at:
                self._thin_at = self._num_bytes + self._detail_bytes // 2  # if this fails, do not retry at every line
                self._thin()

    def close(self) -> None:
        self._file.close()

    def _open(self) -> FileIO:
        return self._path.open("ab", buffering=0)  # a buffer would keep data that a full disk refused

    def _thin(self) -> None:
        """Drop details of intermediate steps; keep the first and the newest step."""
        sizes = _detail_sizes(self._path)
        newest, stride = max(sizes), 1
        while (left := _left(sizes, stride, newest)).total() > self._detail_bytes // 2 and stride <= newest:
            stride *= 2
        with atomic_file(self._path) as partial, self._path.open("rb") as old, partial.open("wb") as new:
            new.writelines(line for line in old if not (found := _DETAIL_LINE.match(line)) or int(found[1]) in left)
        self._file.close()
        self._file = self._open()
        self._num_bytes = left.total()
        self._thin_at = max(self._detail_bytes, self._num_bytes + self._detail_bytes // 2)


def _detail_sizes(path: Path) -> Counter[int]:
    """Return the bytes of details by step."""
    sizes: Counter[int] = Counter()
    with path.open("rb") as file:
        for line in file:
            if found := _DETAIL_LINE.match(line):
                sizes[int(found[1])] += len(line)
    return sizes


def _left(sizes: Counter[int], stride: int, newest: int) -> Counter[int]:
    """Return the sizes that are left after keeping one of `stride` blocks of steps."""
    return Counter(
        {step: size for step, size in sizes.items() if step == newest or (step - 1) // _BLOCK_STEPS % stride == 0}
    )


def _drop_cut_line(path: Path) -> None:
    """Truncate a file to its last complete line, so that new lines do not continue a partial one."""
    if not path.is_file():
        return
    with path.open("r+b") as file:
        end = file.seek(0, 2)
        while end:
            begin = max(0, end - 2**16)
            file.seek(begin)
            newline = file.read(end - begin).rfind(b"\n")
            if newline >= 0:
                file.truncate(begin + newline + 1)
                return
            end = begin
        file.truncate(0)


class Recorder:
    """Send records to metrics.jsonl and other sinks. Their failures are counted and never end the run."""

    def __init__(self, truth: Sink, others: Sequence[Sink] = ()) -> None:
        self._truth = truth
        self._others = tuple(others)
        self._when: dict[str, Any] = {"step": 0, "time_s": 0.0}
        self.counts = Counter({"metrics/sink_errors": 0, "metrics/records_lost": 0})
        """Failures since the start by metric key, in the record of every step."""

    def write(self, kind: str, record: Mapping[str, Any]) -> None:
        self._when |= {key: record[key] for key in self._when if key in record}
        try:
            self._truth.write(kind, record)
        except OSError as error:  # usually a full disk: the run matters more than its record, and space may be freed
            self.counts["metrics/records_lost"] += 1
            if self.counts["metrics/records_lost"] == 1:
                self.show("event", {**self._when, "what": "metrics_not_written", "why": str(error)})
        self.show(kind, record)

    def event(self, what: str, **fields: object) -> None:
        """Record an event from a part without the run's clock, at the time of the last record."""
        self.write("event", {**self._when, "what": what, **fields})

    def show(self, kind: str, record: Mapping[str, Any]) -> None:
        """Send a record, such as "progress", to live displays but not to metrics.jsonl."""
        for sink in self._others:
            try:
                sink.write(kind, record)
            except Exception:  # noqa: BLE001  a sink may fail in any way; the run continues and the count reports it
                self.counts["metrics/sink_errors"] += 1

    def close(self) -> None:
        for sink in self._others:
            try:
                sink.close()
            except Exception:  # noqa: BLE001  as above
                self.counts["metrics/sink_errors"] += 1
        try:
            self._truth.close()
        except OSError:
            self.counts["metrics/records_lost"] += 1


def stream_metrics(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the kind and content of each record of a metrics.jsonl; skip a last line that a crash cut off."""
    for number, record in read_jsonl(path, strict=True):
        kind = record.pop("kind", None) if isinstance(record, dict) else None
        if not isinstance(kind, str):
            raise ValueError(
                f"{path}, line {number}: got {str(record)[:60]!r}; must be one record of a run; delete the line to "
                "read the others"
            )
        yield kind, record


def read_metrics(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Return all records of a metrics.jsonl by kind. They are held in memory; stream long runs instead."""
    records: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for kind, record in stream_metrics(path):
        records[kind].append(record)
    return dict(records)
