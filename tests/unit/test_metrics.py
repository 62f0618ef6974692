"""Reduction of metrics, the file that a crash may cut, and sinks that may only fail."""

from __future__ import annotations

import json
import math
import resource
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from paceline.metrics import JsonlSink, Max, Mean, Metrics, Recorder, Sum, read_metrics


class ListSink:
    """Remembers what it was given; fails on request."""

    def __init__(self, *, fails: bool = False) -> None:
        self.fails = fails
        self.records: list[tuple[str, Mapping[str, Any]]] = []
        self.closed = False

    def write(self, kind: str, record: Mapping[str, Any]) -> None:
        if self.fails:
            raise OSError("no route to host")
        self.records.append((kind, record))

    def close(self) -> None:
        self.closed = True
        if self.fails:
            raise OSError("no route to host")


# Reduction.


def test_mean_of_unequal_parts_is_the_mean_of_all_values():
    metrics = Metrics()
    metrics.add("reward/mean", Mean.of([1.0, 1.0, 1.0]))
    metrics.add("reward/mean", Mean.of([0.0]))
    assert metrics.reduce() == {"reward/mean": 0.75}  # the mean of means would be 0.5


def test_merging_does_not_depend_on_how_work_was_split():
    values = [0.5, 2.0, -1.0, 4.0, 4.5]
    whole = Mean.of(values)
    for cut in range(len(values) + 1):
        assert Mean.of(values[:cut]).merge(Mean.of(values[cut:])) == whole


def test_sum_and_max_reduce_by_their_own_rule():
    metrics = Metrics()
    for value in (3.0, 7.0, 5.0):
        metrics.add("sum", Sum(value))
        metrics.add("max", Max(value))
    assert metrics.reduce() == {"max": 7.0, "sum": 15.0}


def test_nothing_counted_is_not_a_number_rather_than_zero():
    assert math.isnan(Mean.of([]).value())


@pytest.mark.parametrize("order", [(math.nan, 1.0), (1.0, math.nan)])
def test_largest_of_a_number_and_nan_is_nan_in_either_order(order: tuple[float, float]):
    assert math.isnan(Max(order[0]).merge(Max(order[1])).value())


def test_two_kinds_of_metric_under_one_key_are_a_bug_not_a_number():
    metrics = Metrics()
    metrics.add("time/train", Sum(3.0))
    with pytest.raises(AssertionError, match="time/train: Sum merged with Mean"):
        metrics.add("time/train", Mean(8.0, 4.0))
    assert metrics.reduce() == {"time/train": 3.0}


# metrics.jsonl.


def test_records_come_back_by_kind_and_in_order(tmp_path: Path):
    sink = JsonlSink(tmp_path / "new" / "metrics.jsonl")
    sink.write("step", {"step": 1, "metrics": {"k3": math.nan}})
    sink.write("eval", {"step": 1})
    sink.write("step", {"step": 2, "metrics": {}})
    sink.close()
    records = read_metrics(tmp_path / "new" / "metrics.jsonl")
    assert [record["step"] for record in records["step"]] == [1, 2]
    assert math.isnan(records["step"][0]["metrics"]["k3"])
    assert records["eval"] == [{"step": 1}]


def test_record_is_on_disk_before_the_sink_is_closed(tmp_path: Path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write("step", {"step": 1})
    assert read_metrics(tmp_path / "metrics.jsonl") == {"step": [{"step": 1}]}
    sink.close()


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_last_line_cut_by_a_crash_is_left_out(tmp_path: Path, cut: int):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "step", "step": 1}\n{"kind": "step", "step": 2}\n'[:-cut])
    assert read_metrics(path) == {"step": [{"step": 1}]}


def test_what_is_appended_after_a_crash_does_not_melt_into_the_cut_line(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "step", "step": 1}\n{"kind": "st')
    sink = JsonlSink(path)
    sink.write("step", {"step": 2})
    sink.close()
    assert read_metrics(path) == {"step": [{"step": 1}, {"step": 2}]}


@pytest.mark.parametrize("line", ["not json", '{"step": 2}', "[1]", "7", ""])
def test_damage_in_the_middle_is_named_by_its_line_and_not_skipped(tmp_path: Path, line: str):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"kind": "step", "step": 1}}\n{line}\n{{"kind": "step", "step": 3}}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2: .*delete the line"):
        read_metrics(path)


def test_value_that_json_refuses_leaves_no_half_line(tmp_path: Path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    with pytest.raises(TypeError):
        sink.write("step", {"step": 1, "bad": object()})
    sink.write("step", {"step": 2})
    sink.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == {"step": [{"step": 2}]}


def test_field_called_kind_cannot_change_the_kind_of_a_record(tmp_path: Path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    with pytest.raises(AssertionError):
        sink.write("event", {"kind": "step"})
    sink.close()


def test_line_separators_inside_a_text_do_not_break_a_line(tmp_path: Path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write("event", {"why": "a\nb\u2028c\x85d"})
    sink.close()
    assert read_metrics(tmp_path / "metrics.jsonl")["event"][0]["why"] == "a\nb\u2028c\x85d"


def write_steps(path: Path, steps: range, *, detail_bytes: int, num_rollouts: int = 50) -> int:
    """Write steps with details of about 250 bytes and 50 bytes of metrics; returns the largest size of all details."""
    sink = JsonlSink(path, detail_bytes=detail_bytes)
    most = 0
    for step in steps:
        sink.write("rollouts", {"step": step, "length": [100] * num_rollouts})
        sink.write("mismatch", {"step": step, "worst": []})
        sink.write("step", {"step": step, "metrics": {"reward/mean": 0.5}})
        lines = path.read_bytes().splitlines(keepends=True)
        most = max(most, sum(len(line) for line in lines if b'"kind": "step"' not in line))
    sink.close()
    return most


def test_details_of_a_long_run_are_bounded_and_metrics_of_every_step_stay(tmp_path: Path):
    """At 8,192 rollouts a step, metrics.jsonl would be 3.3 GB after 10,000 steps."""
    path = tmp_path / "metrics.jsonl"
    assert write_steps(path, range(1, 301), detail_bytes=40_000) <= 40_000
    assert write_steps(path, range(301, 401), detail_bytes=40_000) <= 40_000, "a run that goes on counts what is there"
    records = read_metrics(path)
    assert [record["step"] for record in records["step"]] == list(range(1, 401))
    kept = [record["step"] for record in records["rollouts"]]
    assert kept[:8] == list(range(1, 9)), "in asynchronous training one step alone does not tell what engines did"
    assert kept[-1] == 400, "whoever looks for the cause of a stop looks at the newest"
    assert max(b - a for a, b in pairwise(kept)) <= 400 // 4, "spread over the whole run"
    assert [record["step"] for record in records["mismatch"]] == kept
    assert sorted(file.name for file in tmp_path.iterdir()) == ["metrics.jsonl"]


def test_a_detail_larger_than_its_room_is_written_and_does_not_rewrite_the_file_at_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    thin, times = JsonlSink._thin, []
    monkeypatch.setattr(JsonlSink, "_thin", lambda self: (times.append(1), thin(self)))
    write_steps(tmp_path / "metrics.jsonl", range(1, 101), detail_bytes=2000, num_rollouts=100)
    assert len(times) < 60
    assert len(read_metrics(tmp_path / "metrics.jsonl")["step"]) == 100


def test_a_cut_line_is_dropped_from_the_end_of_a_file_of_any_size(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    whole = b'{"kind": "step", "step": 1}\n'
    for content, left in (
        (b"", b""),
        (b"x" * 200_000, b""),
        (whole, whole),
        (whole + b"x" * 200_000, whole),
        (whole * 9000 + b"x", whole * 9000),
    ):
        path.write_bytes(content)
        JsonlSink(path).close()
        assert path.read_bytes() == left


# Recorder.


def test_sink_that_fails_is_counted_and_stops_nobody():
    truth, broken, other = ListSink(), ListSink(fails=True), ListSink()
    recorder = Recorder(truth, [broken, other])
    recorder.write("step", {"step": 1})
    recorder.write("step", {"step": 2})
    assert recorder.counts["metrics/sink_errors"] == 2
    assert len(truth.records) == len(other.records) == 2


def test_full_disk_is_counted_and_said_once_and_does_not_end_the_run():
    truth, console = ListSink(fails=True), ListSink()
    recorder = Recorder(truth, [console])
    recorder.write("stage", {"step": 3, "stage": "data", "time_s": 1.5})
    recorder.write("stage", {"step": 3, "stage": "train", "time_s": 1.5})
    truth.fails = False
    recorder.write("stage", {"step": 3, "stage": "sync", "time_s": 2.5})
    assert recorder.counts["metrics/records_lost"] == 2
    assert [record["stage"] for _, record in truth.records] == ["sync"]
    (event,) = [record for kind, record in console.records if kind == "event"]
    assert (event["what"], event["step"], event["time_s"]) == ("metrics_not_written", 3, 1.5)
    assert "no route to host" in event["why"]
    assert len(console.records) == 4  # whoever watches still sees everything


def test_line_that_the_disk_took_in_part_is_taken_back(tmp_path: Path):
    """The next record would melt into it, and a report would refuse the whole file."""
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.write("step", {"step": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            sink.write("step", {"step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    sink.write("step", {"step": 3})
    sink.close()
    assert read_metrics(path) == {"step": [{"step": 1}, {"step": 3}]}


def test_event_of_a_part_without_a_clock_stands_where_the_run_is():
    truth = ListSink()
    recorder = Recorder(truth)
    recorder.write("stage", {"step": 3, "stage": "prepare", "time_s": 1.5})
    recorder.event("reward_failed", why="hangs")
    assert truth.records[-1] == ("event", {"step": 3, "time_s": 1.5, "what": "reward_failed", "why": "hangs"})


def test_progress_is_shown_and_not_kept():
    truth, live = ListSink(), ListSink()
    Recorder(truth, [live]).show("progress", {"done": 3, "total": 8})
    assert truth.records == []
    assert live.records == [("progress", {"done": 3, "total": 8})]


def test_console_gets_its_close_even_when_the_file_cannot_be_closed():
    truth, broken, console = ListSink(fails=True), ListSink(fails=True), ListSink()
    recorder = Recorder(truth, [broken, console])
    recorder.close()
    assert truth.closed
    assert broken.closed
    assert console.closed
    assert (recorder.counts["metrics/sink_errors"], recorder.counts["metrics/records_lost"]) == (1, 1)


def test_file_is_json_that_other_programs_can_read(tmp_path: Path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write("step", {"step": 1, "metrics": {"reward/mean": 0.5}})
    sink.close()
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line) == {"kind": "step", "step": 1, "metrics": {"reward/mean": 0.5}}


def test_counters_and_failures_are_documented() -> None:
    """A number that nobody can look up is not told."""
    from paceline.metrics import PER_STEP, SINCE_START
    from paceline.orchestrator.engine_counters import SHARES, SUMS

    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert [key for key in (*SUMS, *SHARES, *PER_STEP, *SINCE_START) if f"`{key}`" not in page] == []
