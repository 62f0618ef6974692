"""The page and the numbers that `paceline report` makes of a run, on recorded runs with a known answer."""

from __future__ import annotations

import json
import re
import sys
import tracemalloc
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jinja2 import UndefinedError

from benchmarks.simulated import SimulatedEngine, SimulatedSender, long_tailed_lengths
from contexts import arena_config
from paceline.metrics import JsonlSink, Recorder
from paceline.orchestrator.loop import Parts, train
from paceline.orchestrator.members import Members
from paceline.plan.simulate import SimulatedLearner, run_virtual, score_by_parity, simulated_prompts
from paceline.report.draft_length import curves
from paceline.report.recorded import StepRollouts, read_run
from paceline.report.render import render
from paceline.report.run import length_histogram, write_report
from paceline.report.summary import failure_rows, in_flight, occupancy, subtract, summary, union


@dataclass
class FakeRun:
    """Writes the metrics.jsonl of a run with long-tailed lengths: an engine's rollouts share its speed, hence a real
    tail."""

    path: Path
    name: str = "arena small"
    num_engines: int = 2
    num_rollouts: int = 128
    steps: int = 20
    planned_steps: int = 20
    eval_every: int = 5
    lost_at: int | None = None
    engine_name: str = "engine-{}"

    def write(self) -> Path:
        self.random = np.random.default_rng(7)
        self.now_s = 3.0
        config = {
            "run": {"name": self.name, "steps": self.planned_steps, "seed": 0},
            "policy": {"model": "arena:small"},
            "rollout": {"num_engines": self.num_engines, "max_tokens": 640},
            "eval": {"every": self.eval_every, "num_prompts": 256},
        }
        environment = {"versions": {"vllm": "0.32.0", "torch": "2.13.0"}, "cores": 2}
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / "metrics.jsonl").open("w") as self.file:
            self.put("run", config=config, environment=environment, started="2026-11-15T01:02:03")
            self.evaluate(0)
            for step in range(1, self.steps + 1):
                self.one_step(step)
        return self.path

    def put(self, kind: str, **record: Any) -> None:
        self.file.write(json.dumps({"kind": kind, **record}) + "\n")

    def evaluate(self, step: int) -> None:
        if self.eval_every and (step % self.eval_every == 0 or step == self.planned_steps):
            self.put("stage", step=step, stage="eval", time_s=self.now_s)
            self.now_s += 2.5
            accuracy = 0.5 + 0.25 * step / self.planned_steps + self.random.normal(0, 0.01)
            self.put(
                "eval", step=step, time_s=self.now_s, metrics={"eval/accuracy": accuracy, "eval/length_mean": 90.0}
            )

    def one_step(self, step: int) -> None:
        names = [self.engine_name.format(i) for i in range(self.num_engines)]
        if self.lost_at is not None and step >= self.lost_at:
            names.pop()
        begin = self.now_s
        self.now_s += 0.05
        length = np.minimum(
            self.random.lognormal(4.3 + 0.3 * step / self.planned_steps, 0.8, self.num_rollouts).astype(int) + 8, 640
        )
        engine = np.arange(self.num_rollouts) % len(names)
        end_s = np.zeros(self.num_rollouts)
        for index in range(len(names)):
            end_s[engine == index] = self.now_s + finish_times(
                np.sort(length[engine == index]), self.random.uniform(0.9, 1.1)
            )
            length[engine == index] = np.sort(length[engine == index])
        reward = (self.random.random(self.num_rollouts) < 0.5 + 0.25 * step / self.planned_steps).astype(float)
        generation_s = float(end_s.max() - self.now_s)
        if step == self.lost_at:
            self.put(
                "event",
                step=step,
                time_s=self.now_s + 1,
                what="engine_lost",
                engine="engine-x",
                why="froze",
                redispatched=17,
            )
        columns = {"engine": engine.tolist(), "start_s": [self.now_s] * self.num_rollouts, "end_s": end_s.tolist()}
        self.put("rollouts", step=step, engines=names, **columns, length=length.tolist(), reward=reward.tolist())
        self.now_s = float(end_s.max()) + 2.9
        metrics = {
            "time/data": 0.05,
            "time/generation": generation_s,
            "time/prepare": 0.12,
            "time/logprob": 0.6 + 0.1 * self.random.random(),
            "time/train": 1.6 + 0.3 * self.random.random(),
            "time/sync": 0.45,
            "time/step": generation_s + 2.95,
            "reward/mean": float(reward.mean()),
            "rollout/length_mean": float(length.mean()),
            "rollout/length_max": int(length.max()),
            "rollout/tokens_per_s": float(length.sum() / generation_s),
            "rollout/truncated_share": float((length == 640).mean()),
            "mismatch/k3": float(4e-5 * self.random.lognormal(0, 0.3)),
            "sync/seconds": 0.4 + 0.05 * self.random.random(),
            "sync/bytes": 12.7e6,
            "fleet/engines": len(names),
        }
        self.put("stage", step=step, stage="data", time_s=begin)
        self.put("step", step=step, time_s=self.now_s, metrics=metrics)
        self.evaluate(step)


def finish_times(sorted_lengths: np.ndarray, pace: float) -> np.ndarray:
    """Seconds at which rollouts of these lengths end; an engine step takes 8 ms, and 0.1 ms more for each rollout."""
    steps = np.diff(sorted_lengths, prepend=0)
    return pace * np.cumsum(steps * (0.008 + 0.0001 * np.arange(len(steps), 0, -1)))


def rollouts(step: int, engines: list[str], spans: list[tuple[int, float, float]]) -> StepRollouts:
    engine, start_s, end_s = (np.array(column) for column in zip(*spans, strict=True))
    ones = np.ones(len(spans))
    return StepRollouts(
        step=step,
        engines=tuple(engines),
        engine=engine,
        start_s=start_s,
        end_s=end_s,
        length=ones.astype(int),
        reward=ones,
    )


# The tail.

# a: busy 0..10.   b: busy 0..4, so idle 4..10: tail 6 of 10 s, idle 6 of 20 engine seconds.
STEP_1 = rollouts(1, ["a", "b"], [(0, 0.0, 3.0), (0, 0.0, 10.0), (1, 0.0, 4.0)])


def test_shares_of_a_timeline_made_by_hand():
    found = occupancy([STEP_1])
    assert found.tail == [(4.0, 10.0)]
    assert found.idle == {"a": [], "b": [(4.0, 10.0)]}
    assert found.tail_share == pytest.approx(0.6)
    assert found.idle_share == pytest.approx(0.3)


def test_two_idle_engines_at_once_make_one_tail_not_two():
    step = rollouts(1, ["a", "b", "c"], [(0, 0.0, 10.0), (1, 0.0, 4.0), (2, 0.0, 8.0)])
    found = occupancy([step])
    assert found.tail_share == pytest.approx(0.6)  # 4..10, not 6 + 2
    assert found.idle_share == pytest.approx(8 / 30)


def test_idle_share_of_a_run_weighs_steps_by_their_seconds():
    short = rollouts(2, ["a", "b"], [(0, 100.0, 101.0), (1, 100.0, 101.0)])  # nobody waits, for one second
    found = occupancy([STEP_1, short])
    assert found.idle_share == pytest.approx(6 / 22)  # the mean of the steps' shares would be 0.15
    assert found.tail_share == pytest.approx(6 / 11)


def test_time_between_phases_is_not_idle():
    later = rollouts(2, ["a", "b"], [(0, 50.0, 60.0), (1, 50.0, 60.0)])
    assert occupancy([STEP_1, later]).idle_share == pytest.approx(6 / 40)


def test_rollouts_of_the_next_step_keep_an_engine_busy_in_an_asynchronous_run():
    ahead = rollouts(2, ["a", "b"], [(1, 4.0, 12.0), (0, 10.0, 12.0)])
    assert occupancy([STEP_1, ahead]).idle_share == 0.0
    assert occupancy([STEP_1, ahead], within=STEP_1.window).tail == []


def test_an_engine_that_was_lost_is_not_idle_afterward():
    without_b = rollouts(2, ["a"], [(0, 20.0, 30.0)])
    assert occupancy([STEP_1, without_b]).idle_share == pytest.approx(6 / 30)


def test_an_engine_with_no_rollout_at_all_is_idle():
    found = occupancy([rollouts(1, ["a", "b"], [(0, 0.0, 10.0)])])
    assert found.idle_share == pytest.approx(0.5)
    assert found.tail_share == pytest.approx(1.0)


def test_an_evaluation_inside_a_phase_is_not_idle_time():
    assert occupancy([STEP_1], evals=[(5.0, 10.0)]).idle_share == pytest.approx(1 / 10)


def test_sets_of_time_agree_with_counting_points():
    random = np.random.default_rng(3)
    points = np.arange(0, 100) + 0.5
    for _ in range(50):
        a, b = (
            union(
                (int(s), int(s + d)) for s, d in zip(random.integers(0, 90, 6), random.integers(0, 10, 6), strict=True)
            )
            for _ in "ab"
        )
        inside = lambda intervals: np.array([any(s < p < e for s, e in intervals) for p in points])  # noqa: E731
        assert (inside(subtract(a, b)) == (inside(a) & ~inside(b))).all()


def test_in_flight_counts_by_hand_for_one_engine_and_for_all():
    edges, counts = in_flight([STEP_1], (0.0, 10.0))
    assert (edges.tolist(), counts.tolist()) == ([0.0, 3.0, 4.0, 10.0], [3, 2, 1])
    edges, counts = in_flight([STEP_1], (0.0, 10.0), "b")
    assert (edges.tolist(), counts.tolist()) == ([0.0, 4.0, 10.0], [1, 0])


def test_idle_share_of_a_synchronous_run_is_the_wait_for_the_last_rollout(tmp_path: Path):
    config = arena_config(
        ["run.steps=3", "rollout.prompts_per_step=8", "rollout.engine.max_num_seqs=4", "eval.every=2"]
    )

    async def work() -> None:
        lengths = long_tailed_lengths(0)
        engines = [
            SimulatedEngine(name=f"e{i}", length_of=lengths, max_num_seqs=4, seconds_per_token=0.01) for i in range(3)
        ]
        parts = Parts(
            members=Members(engines),
            learner=SimulatedLearner(seconds_per_token=0.001),
            sender=SimulatedSender(engines=engines),
            prompts=simulated_prompts(),
            heldout=list(islice(simulated_prompts(), 4)),
            score=score_by_parity,
        )
        recorder = Recorder(JsonlSink(tmp_path / "metrics.jsonl"))
        await train(parts, config, recorder)
        recorder.close()

    run_virtual(work)
    run = read_run(tmp_path)
    expected = []
    for batch in run.rollouts:
        begin_s, end_s = batch.window
        waits_s = [end_s - batch.end_s[batch.engine == engine].max() for engine in range(3)]
        expected.append(sum(waits_s) / (3 * (end_s - begin_s)))
    assert [occupancy([batch]).idle_share for batch in run.rollouts] == pytest.approx(expected, abs=1e-3)
    assert max(expected) > 0.05
    assert len(run.eval_intervals) == len(run.evals) >= 2


# Lengths.


def test_histogram_counts_by_hand_and_keeps_the_longest():
    edges, (first, last) = length_histogram([[0, 1, 2, 3], [9, 9]], num_bins=5)
    assert edges == [0, 2, 4, 6, 8, 10]
    assert first == [0.5, 0.5, 0, 0, 0]
    assert last == [0, 0, 0, 0, 1.0]


def test_histogram_loses_no_rollout_at_any_longest_length():
    for longest in range(130):
        _, (shares,) = length_histogram([[0, longest]])
        assert sum(shares) == pytest.approx(1.0), longest


# Headline figures.


def test_summary_of_a_run_written_by_hand(tmp_path: Path):
    columns = {
        "engines": ["a", "b"],
        "engine": [0, 0, 1],
        "start_s": [0, 0, 0],
        "end_s": [3, 10, 4],
        "length": [3, 10, 4],
    }
    lines = [
        {"kind": "run", "config": {"run": {"name": "x", "steps": 3}}, "environment": {}, "started": "now"},
        {"kind": "eval", "step": 0, "time_s": 0, "metrics": {"eval/accuracy": 0.25}},
        {"kind": "rollouts", "step": 1, **columns, "reward": [0, 0, 1]},
        step_line(
            1,
            12,
            {"time/step": 12, "time/generation": 10, "rollout/tokens_per_s": 100, "rollout/truncated_share": 1 / 3},
        ),
        {
            "kind": "event",
            "step": 2,
            "time_s": 13,
            "what": "engine_lost",
            "engine": "b",
            "why": "froze",
            "redispatched": 5,
        },
        {
            "kind": "rollouts",
            "step": 2,
            "engines": ["a"],
            "engine": [0],
            "start_s": [20],
            "end_s": [30],
            "length": [5],
            "reward": [1],
        },
        step_line(
            2, 40, {"time/step": 28, "time/generation": 10, "rollout/tokens_per_s": 300, "rollout/truncated_share": 0.0}
        ),
        {"kind": "eval", "step": 2, "time_s": 41, "metrics": {"eval/accuracy": 0.5}},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = summary(tmp_path)
    assert (found.num_steps, found.planned_steps, found.duration_s) == (2, 3, 41)
    assert (found.accuracy_start, found.accuracy_end) == (0.25, 0.5)
    assert (found.reward_start, found.reward_end) == (pytest.approx(1 / 3), 1.0)
    assert (found.tokens_per_s, found.step_s) == (200, 20)
    assert found.generation_share == pytest.approx(0.5)
    assert found.idle_share == pytest.approx(6 / 30)
    assert found.truncated_share == pytest.approx(1 / 4)  # one of four rollouts, not the mean of 1/3 and 0
    assert (found.num_engines_lost, found.num_redispatched) == (1, 5)
    values = {headline.label: headline.value for headline in found.headlines()}
    assert values["Held-out accuracy"] == "0.250 → 0.500"
    assert values["Steps"] == "2 of 3"
    assert values["Idle engine time"] == "20 %"


def step_line(step: int, time_s: float, metrics: dict[str, float]) -> dict[str, Any]:
    return {"kind": "step", "step": step, "time_s": time_s, "metrics": metrics}


# The page.


@pytest.mark.parametrize(("num_engines", "num_rollouts"), [(2, 64), (32, 256)])
def test_page_of_a_whole_run_is_one_file_that_loads_nothing(tmp_path: Path, num_engines: int, num_rollouts: int):
    run = FakeRun(
        tmp_path, num_engines=num_engines, num_rollouts=num_rollouts, steps=8, planned_steps=8, eval_every=4, lost_at=5
    ).write()
    page = write_report(run, step=2).read_text()
    assert page.count("<svg") == page.count("</svg>") == 6
    assert not re.search(
        r"https?:|//[a-z]|@import|<script|<link|<img|<iframe|src=|<!DOCTYPE svg", page, flags=re.IGNORECASE
    )
    assert set(re.findall(r"url\(([^)]{1,2})", page)) <= {"#p", "#m"}  # clip paths and markers inside the page
    for text in (
        "generation",
        "logprob",
        "train",
        "sync",
        "prepare",
        "data",
        "held-out accuracy",
        "tail: some engine is idle",
    ):
        assert f">{text}" in page, text
    assert "engine lost" in page
    assert "still going" not in page


def test_run_that_lost_its_last_line_in_a_crash_is_reported_up_to_there(tmp_path: Path):
    run = FakeRun(tmp_path, steps=3, num_rollouts=16, eval_every=0).write()
    path = run / "metrics.jsonl"
    whole = path.read_text()
    path.write_text(whole[:-40])
    assert summary(run).num_steps == 2
    assert "still going or was stopped" in write_report(run).read_text()


def test_run_of_one_step_without_evaluation(tmp_path: Path):
    run = FakeRun(tmp_path, steps=1, num_rollouts=16, eval_every=0).write()
    page = write_report(run).read_text()
    assert summary(run).accuracy_start is None
    assert "Step 1:" in page
    assert "held-out accuracy" not in page


def test_step_that_skipped_its_update_leaves_a_gap_not_an_error(tmp_path: Path):
    run = FakeRun(tmp_path, steps=2, num_rollouts=16).write()
    path = run / "metrics.jsonl"
    path.write_text(re.sub(r'"(mismatch/k3|sync/seconds|sync/bytes|time/train)": [^,}]+, ', "", path.read_text()))
    page = write_report(run).read_text()
    assert "The mismatch was not recorded" in page
    assert "No sync was recorded" in page


def test_rewards_beyond_one_do_not_share_the_axis_of_accuracy(tmp_path: Path):
    run = FakeRun(tmp_path, steps=2, num_rollouts=16, eval_every=1).write()
    path = run / "metrics.jsonl"
    path.write_text(re.sub(r'"reward/mean": [^,}]+', '"reward/mean": -7.5', path.read_text()))
    page = write_report(run).read_text()
    assert ">held-out accuracy</text>" in page
    assert ">mean reward</text>" in page


def test_names_from_outside_cannot_become_markup(tmp_path: Path):
    evil = '<script>alert("x")</script>$\\frac{$'
    run = FakeRun(tmp_path / '<script src="x">', name=evil, engine_name="<i>{}$x_$", steps=1, num_rollouts=8).write()
    page = write_report(run).read_text()
    assert "<script" not in page
    assert "<i>" not in page
    assert "<h1>&lt;script src=&#34;x&#34;&gt;</h1>" in page
    assert "&lt;script&gt;alert(&#34;x&#34;)&lt;/script&gt;" in page
    assert "&lt;i&gt;0$x_$" in page


def test_answers_of_the_first_and_the_last_evaluation_are_shown_as_they_were_written(tmp_path: Path):
    run = FakeRun(tmp_path / "run", steps=4).write()
    with (run / "metrics.jsonl").open("a") as file:
        for step, said in ((0, "at first"), (2, "between"), (4, "<b>in</b>\nthe end")):
            text = {"which": "best", "reward": 0.25, "prompt_id": "heldout/1", "prompt": "1 < 2?\n", "completion": said}
            file.write(json.dumps({"kind": "texts", "step": step, "time_s": 1.0, "texts": [text]}) + "\n")
    page = write_report(run).read_text()
    assert "<th>step 0, best, reward 0.25</th><td>1 &lt; 2?\n\nat first</td>" in page
    assert "<th>step 4, best, reward 0.25</th><td>1 &lt; 2?\n\n&lt;b&gt;in&lt;/b&gt;\nthe end</td>" in page
    assert "between" not in page
    assert "Answers to held-out prompts" not in write_report(FakeRun(tmp_path / "without", steps=4).write()).read_text()


def test_chosen_step_is_shown_and_an_unknown_one_refused(tmp_path: Path):
    run = FakeRun(tmp_path, steps=3, num_rollouts=16).write()
    assert "Step 2:" in write_report(run, step=2).read_text()
    with pytest.raises(ValueError, match="step: got 9; must be one of the recorded steps, 1 to 3"):
        write_report(run, step=9)


def test_a_missing_record_fails_instead_of_leaving_a_gap():
    with pytest.raises(UndefinedError, match="tuning"):
        render("tune.html", command="vllm serve", config={}, panels=[])


def test_same_run_gives_the_same_page(tmp_path: Path):
    run = FakeRun(tmp_path, steps=2, num_rollouts=16).write()
    assert write_report(run).read_text() == write_report(run).read_text()


# Errors that say what to do.


def test_directory_without_metrics_says_what_a_run_is(tmp_path: Path):
    with pytest.raises(ValueError, match=r"has no metrics.jsonl; must be a run's directory"):
        write_report(tmp_path)


def test_run_before_its_first_step_says_wait(tmp_path: Path):
    run = FakeRun(tmp_path, steps=0).write()
    with pytest.raises(ValueError, match="no finished step yet; wait"):
        read_run(run)


def test_missing_matplotlib_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = FakeRun(tmp_path, steps=1, num_rollouts=8).write()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"pip install 'paceline\[report\]'"):
        write_report(run)
    assert summary(run).num_steps == 1  # the closing table of a run needs no plots


def drafts_record(*, step: int, engines: int, seconds: float = 12.0, begin_s: float = 5.0) -> dict[str, Any]:
    """A phase that shrinks: engines draft further as their batch gets smaller."""
    rows = []
    for engine in range(engines):
        width_s = 0.25 if engine == 0 else 0.5
        for number in range(int(seconds / width_s) - 4 * engine):
            at = number * width_s / seconds
            batch, steps = max(1, round(32 * (1 - at))), 10
            draft = 0 if at < 0.3 else (2 if at < 0.7 else 4 + engine)
            verifications = steps * batch if draft else 0
            accepted = round(0.6 * draft * verifications)
            rows.append(
                (
                    engine,
                    begin_s + number * width_s,
                    width_s,
                    steps,
                    steps * draft,
                    verifications,
                    accepted,
                    steps * batch,
                )
            )
    names = ("engine", "begin_s", "width_s", "num_steps", "draft_length")
    names += ("num_verifications", "num_accepted", "num_requests")
    columns = {name: list(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}
    return {"step": step, "time_s": begin_s + seconds, "engines": [f"engine-{i}" for i in range(engines)], **columns}


def test_draft_length_is_drawn_over_the_time_of_a_step(tmp_path: Path) -> None:
    """Bins of different width must be laid over one another before engines are averaged."""
    path = FakeRun(tmp_path / "run").write()
    with (path / "metrics.jsonl").open("a") as file:
        for step in (1, 20):
            file.write(json.dumps({"kind": "draft_length", **drafts_record(step=step, engines=2)}) + "\n")
    run = read_run(path)
    found = curves(run.drafts[-1])
    assert found.edges_s[1] == 0.5
    assert found.requests[0] == pytest.approx(64, abs=1)
    assert np.isnan(found.accepted_length[0]) and found.draft_length[0] == 0
    assert found.draft_length[-1] == 4 and np.isnan(found.by_engine["engine-1"][-1])
    assert found.accepted_length[-1] == pytest.approx(3.4)
    page = write_report(path).read_text(encoding="utf-8")
    assert "Step 20: engines drafted 0.0 tokens at first" in page


def test_failures_are_in_a_table_and_their_absence_too(tmp_path: Path) -> None:
    path = FakeRun(tmp_path / "run", steps=3).write()
    assert failure_rows(read_run(path)) == []
    assert "<th>none</th>" in write_report(path).read_text()
    metrics = {"selector/failures": 2, "metrics/sink_errors": 7}
    with (path / "metrics.jsonl").open("a") as file:
        for step in (4, 5):
            file.write(json.dumps({"kind": "step", "step": step, "time_s": 1.0, "metrics": metrics}) + "\n")
    rows = dict(failure_rows(read_run(path)))
    assert set(rows) == set(metrics)
    assert rows["selector/failures"].startswith("4: ")  # of each step
    assert rows["metrics/sink_errors"].startswith("7: ")  # since the start


def test_a_long_run_is_not_held_in_memory_as_python_objects(tmp_path: Path):
    """A report of a large run would otherwise need ten times the size of its file."""
    run = FakeRun(tmp_path, steps=20, num_rollouts=4096, eval_every=0).write()
    size = (run / "metrics.jsonl").stat().st_size
    tracemalloc.start()
    try:
        summary(run)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2.5 * size


def test_engines_are_not_called_idle_in_steps_whose_neighbors_are_not_recorded(tmp_path: Path):
    """In asynchronous training an engine works on the next step already, and details of that may have been dropped."""
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write("run", {"config": {"run": {"max_age": 1}}})
    for step in range(1, 33):
        if (step - 1) // 8 % 2 == 0:  # engine-0 does its part of a step while engine-1 is busy with the one before
            columns = {"engine": [0, 1], "start_s": [step, step + 1], "end_s": [step + 1, step + 2]}
            sink.write(
                "rollouts",
                {"step": step, "engines": ["engine-0", "engine-1"], **columns, "length": [5, 5], "reward": [0, 1]},
            )
        sink.write("step", {"step": step, "time_s": step + 2.0, "metrics": {"time/step": 1.0}})
    sink.close()
    run = read_run(tmp_path)
    assert [batch.step for batch in run.whole_phases()] == [*range(1, 8), *range(18, 24)]
    idle_share = summary(run).idle_share
    assert idle_share is not None and idle_share < 0.04, "only engine-1 before its first rollout"
