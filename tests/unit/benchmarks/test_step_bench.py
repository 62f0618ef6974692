"""What the arms of the step bench are compared by."""

from pathlib import Path

import pytest

from benchmarks.harness import Record
from benchmarks.published.cells import amdahl
from benchmarks.step import WARMUP, SteppedRun, compare, settings_of, summarize
from contexts import arena_config
from paceline.metrics import JsonlSink, Recorder
from paceline.report.recorded import RecordedRun, read_run
from paceline.types import PacelineError


def stepped(step_s: float, generation_s: float, num_tokens: float = 100.0, first_tokens: str = "ab") -> SteppedRun:
    return SteppedRun(
        step_s=step_s,
        generation_s=generation_s,
        learner_s=1.0,
        sync_s=0.1,
        num_tokens=num_tokens,
        first_tokens=list(first_tokens),
    )


def recorded(path: Path, num_steps: int, *, without_update: int | None = None) -> RecordedRun:
    recorder = Recorder(JsonlSink(path / "metrics.jsonl"))
    for step in range(1, num_steps + 1):
        slow = 100.0 if step <= WARMUP else 0.0
        metrics = {
            "time/step": slow + step,
            "time/generation": slow + step / 2,
            "time/logprob": 0.5,
            "time/train": 0.25,
            "time/sync": 0.125,
            "rollout/num_tokens": 10.0 * step,
        }
        if step != without_update:
            metrics["policy/optimizer_steps"] = 1.0
        recorder.write("step", {"step": step, "time_s": 1.0 * step, "metrics": metrics})
    recorder.close()
    return read_run(path)


def test_another_drafter_is_for_the_arms_that_speculate_and_all_the_rest_for_every_arm():
    """A plain arm with a drafter would be compared with itself."""
    drafter = ["speculation.drafter.kind=dflash", "speculation.training.mode=off"]
    asked = [*drafter, "rollout.group_size=2", "run.max_age=3"]
    plain, sync, stream = (arena_config(settings_of(arm, asked)) for arm in ("plain", "sync", "stream"))
    assert plain.speculation is None
    assert sync.speculation is not None and sync.speculation.drafter.kind == "dflash"
    assert stream.speculation == sync.speculation
    assert [one.run.max_age for one in (plain, sync, stream)] == [0, 0, 1]
    assert {one.rollout.group_size for one in (plain, sync, stream)} == {2}
    usual = arena_config(settings_of("sync", [])).speculation
    assert usual is not None and usual.drafter.kind == "eagle3" and usual.training.mode == "idle"


def test_speedups_are_of_runs_of_one_seed():
    """A machine that slows down for one seed slows all its arms; arms of different seeds would be compared else."""
    runs = {
        "plain": [stepped(10, 8), stepped(30, 24), stepped(100, 80)],
        "sync": [stepped(6, 4, 90, "ac"), stepped(18, 12, 90), stepped(60, 40, 90, "xb")],
        "stream": [stepped(5, 1), stepped(10, 1), stepped(50, 1)],
    }
    record = Record()
    compare(record, runs)
    figures, spread = record.figures, record.spread
    assert figures["step_speedup"] == pytest.approx(10 / 6) and spread["step_speedup"] == pytest.approx(0)
    assert figures["step_speedup_stream"] == pytest.approx(2) and spread["step_speedup_stream"] == pytest.approx(1)
    assert figures["generation_share"] == pytest.approx(0.8) and figures["generation_speedup"] == pytest.approx(2)
    assert figures["of_amdahl"] == pytest.approx(1), "nothing but generation became faster, and nothing slower"
    assert figures["equal_rollouts"] == pytest.approx(0.5), "a median over the seeds"
    assert figures["tokens_sync"] == pytest.approx(0.9) and figures["step_s_plain"] == 30


def test_of_amdahl_falls_by_what_the_rest_of_the_step_pays():
    """Generation twice as fast allows 10 / 6; a second more of everything else leaves 10 / 7."""
    record = Record()
    compare(record, {"plain": [stepped(10, 8)], "sync": [stepped(7, 4)], "stream": [stepped(7, 4)]})
    assert amdahl(2, 0.8) == pytest.approx(10 / 6)
    assert record.figures["of_amdahl"] == pytest.approx(6 / 7)


def test_a_run_is_summarized_without_its_first_steps(tmp_path: Path):
    found = summarize(recorded(tmp_path, WARMUP + 2), tmp_path)
    mean = WARMUP + 1.5
    assert (found.step_s, found.generation_s) == pytest.approx((mean, mean / 2))
    assert (found.learner_s, found.sync_s, found.num_tokens) == pytest.approx((0.75, 0.125, 10 * mean))


def test_a_run_with_a_missing_update_or_no_counted_step_is_no_measurement(tmp_path: Path):
    for name, num_steps, without, match in (("skipped", 6, 5, "5.*no update"), ("short", WARMUP, None, "run.steps")):
        (tmp_path / name).mkdir()
        with pytest.raises(PacelineError, match=match):
            summarize(recorded(tmp_path / name, num_steps, without_update=without), tmp_path)
