"""What the arms of the stream bench are compared by."""

import pytest

from benchmarks.harness import Record
from benchmarks.learning import Training, compare_streams, idle_time, sync_intervals
from paceline.metrics import JsonlSink, Recorder
from paceline.report.recorded import read_run


def runs(*finals: float, idle_s: float, num_too_old: int = 0) -> list[Training]:
    return [
        Training(
            curve=((0, 0.5), (16, final)),
            step_s=1.0,
            k3=1e-3,
            idle_s=idle_s,
            engine_s=100.0,
            num_too_old=num_too_old,
            age_mean=0.0,
        )
        for final in finals
    ]


@pytest.mark.parametrize(("streamed", "within"), [(0.65, 1.0), (0.71, 1.0), (0.63, 0.0), (0.73, 0.0)])
def test_streaming_is_within_the_spread_of_synchronous_training_or_not(streamed: float, within: float) -> None:
    """Synchronous seeds 0.66 to 0.70: mean 0.68, so 0.64 to 0.72 count as the same."""
    arms = {"sync": runs(0.66, 0.68, 0.70, idle_s=50.0), "stream": runs(*[streamed] * 3, idle_s=10.0, num_too_old=1)}
    record = Record()
    compare_streams(record, arms)
    figures, spread, pairs = record.figures, record.spread, record.details["paired"]
    assert figures["stream_within_spread"] == within
    assert figures["idle_over_sync"] == pytest.approx(0.2) and spread["idle_over_sync"] == 0.0
    assert pairs["idle_over_sync"]["ratios"] == pytest.approx([0.2] * 3)
    assert figures["max_age_exceeded"] == 3


def test_engines_are_idle_without_rollouts_and_during_a_sync_but_not_during_an_evaluation(tmp_path):
    """From 1 to 21 s: rollouts of e0 cover 1-5 and 9-21, of e1 1-21; an evaluation 6-8, a sync 9-10."""
    recorder = Recorder(JsonlSink(tmp_path / "metrics.jsonl"))
    for step, columns in enumerate(
        [
            {"engine": [0, 1, 1], "start_s": [1.0, 1.0, 4.0], "end_s": [5.0, 8.0, 12.0]},
            {"engine": [0, 1], "start_s": [9.0, 11.0], "end_s": [21.0, 21.0]},
        ],
        start=1,
    ):
        num = len(columns["engine"])
        recorder.write("stage", {"step": step, "stage": "eval", "time_s": 6.0 if step == 1 else 30.0})
        recorder.write("stage", {"step": step, "stage": "data", "time_s": 8.0 if step == 1 else 32.0})
        recorder.write(
            "rollouts", {"step": step, "engines": ["e0", "e1"], **columns, "length": [1] * num, "reward": [0.0] * num}
        )
        recorder.write("eval", {"step": step, "time_s": 8.0 if step == 1 else 32.0, "metrics": {"eval/accuracy": 0.5}})
        recorder.write("step", {"step": step, "time_s": 15.0 * step, "metrics": {"time/step": 15.0}})
    recorder.close()
    found = read_run(tmp_path)
    syncs = sync_intervals([{"stage": "sync", "time_s": 9.0}, {"stage": "data", "time_s": 10.0}])
    assert found.eval_intervals == ((6.0, 8.0), (30.0, 32.0))
    assert idle_time(found, syncs) == pytest.approx((1 + 1 + 1 + 1, 2 * 18.0))
