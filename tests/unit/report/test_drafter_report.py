"""Pictures and figures of a run that trained its drafter, from records made by hand whose answer is known."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from paceline.cli import main
from paceline.report.drafter import (
    DOING,
    drafter_rows,
    draw_acceptance,
    draw_marks,
    draw_places,
    draw_updates,
    ratio_at_end,
    updates_of,
    window_of,
)
from paceline.report.recorded import SlotSpan, StepSlots, read_run
from paceline.report.run import write_report

STEP_S = 10.0
ALPHA = [2.0, 2.0, 2.2, 2.4, 3.0, 3.0]

# Of each step of 10 s engine a generates 8 s; b is done after 3 s, trains from 4 to 7.625 s, is called back and
# generates again.
SPANS = [
    ("a", "generate", 0.0, 8.0),
    ("a", "idle", 8.0, 10.0),
    ("b", "generate", 0.0, 3.0),
    ("b", "idle", 3.0, 4.0),
    ("b", "train", 4.0, 7.625),
    ("b", "waking", 7.625, 7.75),
    ("b", "generate", 7.75, 8.0),
    ("b", "idle", 8.0, 10.0),
]
PUBLISHED = {"round": 1, "accepted_length_before": 2.0, "accepted_length_after": 2.4, "tokens_trained": 9000}
EVENTS = [
    {"step": 2, "what": "drafter_published", **PUBLISHED, "training_s": 3.0, "publish_s": 0.2, "gain_s": 6.5},
    {"step": 3, "what": "trainer_lost", "engine": "b", "why": "killed"},
    {"step": 4, "what": "drafter_refused", **PUBLISHED, "training_s": 5.0, "gain_s": -1.5},
    {"step": 5, "what": "drafter_lost", "remedy": "push again"},
]
TRAINING = {
    "draft/decision": 1.0,
    "draft/leasable_s": 4.0,
    "draft/training_s": 3.0,
    "draft/num_recalls": 1.0,
    "draft/recall_max_ms": 40.0,
}


def write_run(
    path: Path,
    *,
    alpha: list[float] = ALPHA,
    training: bool = True,
    events: list[dict[str, Any]] = EVENTS,
    spans: list[tuple[str, str, float, float]] = SPANS,
    metrics: dict[int, dict[str, float]] | None = None,
) -> Path:
    """A speculative run; `metrics` are added to those of a step."""
    lines: list[dict[str, Any]] = [
        {"kind": "run", "config": {"run": {"steps": len(alpha)}}, "environment": {}, "started": "now"}
    ]
    for step, accepted in enumerate(alpha, start=1):
        begin_s = (step - 1) * STEP_S
        columns = {
            "engine": [0, 1],
            "start_s": [begin_s, begin_s],
            "end_s": [begin_s + 8, begin_s + 3],
            "length": [80, 30],
        }
        lines.append({"kind": "rollouts", "step": step, "engines": ["a", "b"], **columns, "reward": [0.0, 1.0]})
        values = {"time/step": STEP_S, "time/generation": 8.0, "reward/mean": 0.5}
        if np.isfinite(accepted):
            values["rollout/accepted_length"] = accepted
        if training:
            values |= TRAINING | {"draft/expected_gain_s": 10.0 * step, "draft/expected_cost_s": 0.1 * step}
            moved = [[engine, doing, begin_s + begin, begin_s + end] for engine, doing, begin, end in spans]
            lines.append({"kind": "places", "step": step, "time_s": begin_s + STEP_S, "spans": moved})
        values |= (metrics or {}).get(step, {})
        lines.append({"kind": "step", "step": step, "time_s": begin_s + STEP_S, "metrics": values})
        lines += [
            {"kind": "event", "time_s": begin_s + 9, **event} for event in events if training and event["step"] == step
        ]
    path.mkdir(parents=True, exist_ok=True)
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def new_axes() -> Axes:
    return Figure().add_subplot()


def titles(page: str) -> list[str]:
    return re.findall(r"<h2>(.*?)</h2>", page)


# The page.


def test_run_that_trained_its_drafter_has_three_pictures_and_a_table(tmp_path: Path):
    page = write_report(write_run(tmp_path)).read_text()
    assert titles(page)[4:7] == [
        "Accepted length rose from 2.00 to 3.00",
        "Steps 3 to 5: engines train the drafter for 18 % of their time and are idle for 25 %",
        "A published update gains 6.5 s, at an expected cost of 0.3 s (median)",
    ]
    assert "An update took 4.0 s of training and 0.20 s to publish (median)." in page
    assert "<details open><summary>Drafter training (6)</summary>" in page
    for text in (
        ">published<",
        ">refused<",
        ">lost<",
        ">generate<",
        ">train<",
        ">idle<",
        ">waking<",
        "expected gain",
        "expected cost",
    ):
        assert text in page, text


def test_page_of_a_run_that_trained_no_drafter_says_nothing_of_it(tmp_path: Path):
    page = write_report(write_run(tmp_path, training=False)).read_text()
    assert page.count("<svg") == 6
    assert "rafter" not in page
    assert "ccepted length" not in page
    assert "<details open" not in page


def test_training_without_leases_has_no_timeline_of_places(tmp_path: Path):
    """Inline training writes no spans, and nothing may be divided by the lease time that it does not have."""
    run = write_run(tmp_path, spans=[], metrics={step: {"draft/leasable_s": 0.0} for step in range(1, 7)})
    page = write_report(run).read_text()
    assert page.count("<svg") == 8
    assert "engines train the drafter" not in page
    assert dict(drafter_rows(read_run(run)))["Idle engine time used for training"] == "n/a"


def test_run_that_has_decided_but_not_yet_updated(tmp_path: Path):
    page = write_report(write_run(tmp_path, alpha=[2.0], events=[])).read_text()
    assert "Accepted length is 2.00 so far" in page
    assert "Step 1: engines train the drafter" in page
    assert "0 published, 0 refused" in page
    assert "expected gain" not in page


def test_engine_names_cannot_become_markup_in_the_timeline(tmp_path: Path):
    spans = [("<i>$x_$", doing, begin, end) for _, doing, begin, end in SPANS]
    page = write_report(write_run(tmp_path, spans=spans)).read_text()
    assert "<i>" not in page
    assert "&lt;i&gt;$x_$" in page


# Accepted length.


def lines_of(axes: Axes) -> dict[str, tuple[list[float], ...]]:
    return {
        str(line.get_label()): tuple(column.tolist() for column in np.asarray(line.get_data()))
        for line in axes.get_lines()
    }


def test_curve_is_of_the_run_it_is_named_after_and_has_gaps(tmp_path: Path):
    axes = new_axes()
    draw_acceptance(axes, read_run(write_run(tmp_path, alpha=[2.0, float("nan"), 4.0])), "x", "blue")
    (dots_x, dots), (line_x, line) = lines_of(axes).values()
    assert dots_x == line_x == [1, 2, 3]
    assert dots == pytest.approx([2.0, np.nan, 4.0], nan_ok=True)
    assert line == pytest.approx([3.0, np.nan, 3.0], nan_ok=True), "a mean over the gap must not fill it"


def test_marks_stand_at_the_step_and_in_the_row_of_their_outcome(tmp_path: Path):
    axes = new_axes()
    draw_marks(axes, read_run(write_run(tmp_path)), ["drafter_lost", "drafter_refused", "drafter_published"])
    found = lines_of(axes)
    assert [found[name][0] for name in ("_published", "_refused", "_lost")] == [[2], [4], [5]]
    rows = {text.get_text(): y for y, text in zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)}
    assert {name: found[f"_{name}"][1] for name in rows} == {name: [y] for name, y in rows.items()}


def test_two_runs_are_compared_at_the_last_steps_that_both_have(tmp_path: Path):
    online = read_run(write_run(tmp_path / "online", alpha=[2.0, 2.0, 3.0, 3.0, 3.0, 3.0, 3.0, 9.0, 9.0, 9.0]))
    frozen = read_run(write_run(tmp_path / "frozen", alpha=[2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0], training=False))
    assert ratio_at_end(online, frozen) == pytest.approx(1.5), "the online run's last steps have no counterpart"
    assert ratio_at_end(frozen, online) == pytest.approx(1 / 1.5)


def test_against_draws_both_curves_also_for_runs_that_trained_no_drafter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    one = write_run(tmp_path / "long drafts", training=False)
    two = write_run(tmp_path / "short drafts", alpha=[1.5] * 8, training=False)
    assert main(["report", str(one), "--against", str(two)]) == 0
    path, words = capsys.readouterr().out.splitlines()
    assert words == "The runs have no recorded rollouts in common."
    page = Path(path).read_text()
    assert page.count("<svg") == 7
    assert "Accepted length rose from 2.00 to 3.00; 1.60 times short drafts at the end" in page  # 2.4 of 1.5
    assert ">long drafts</text>" in page
    assert ">short drafts</text>" in page


def test_two_runs_of_one_name_can_be_told_apart(tmp_path: Path):
    runs = [write_run(tmp_path / day / "arena") for day in ("monday", "tuesday")]
    page = write_report(runs[0], against=runs[1]).read_text()
    assert ">arena</text>" in page
    assert ">arena (other)</text>" in page


def test_a_run_without_speculation_has_no_accepted_length_to_compare(tmp_path: Path):
    ours, plain = write_run(tmp_path / "ours"), write_run(tmp_path / "plain", alpha=[float("nan")] * 3, training=False)
    assert "times plain at the end" not in write_report(ours, against=plain).read_text()
    assert "Accepted length" not in write_report(plain, against=ours).read_text()


# The timeline.


def seen(axes: Axes, engine: str, at_s: float) -> list[str]:
    """What the picture says that an engine does at a time: the row is found by its label, the meaning by its color."""
    rows = {text.get_text(): y for y, text in zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)}
    found: list[str] = []
    for bars in axes.collections:
        boxes = [path.get_extents() for path in bars.get_paths()]
        if any(box.x0 < at_s < box.x1 and box.y0 < rows[engine] < box.y1 for box in boxes):
            color = to_hex(np.asarray(bars.get_facecolor())[0].tolist())
            found += [doing for doing, named in DOING.items() if color == named]
    return found


def drawn(spans: list[tuple[str, str, float, float]]) -> Axes:
    made = [SlotSpan(engine=engine, doing=doing, begin_s=begin, end_s=end) for engine, doing, begin, end in spans]
    axes = new_axes()
    draw_places(axes, [StepSlots(step=1, spans=tuple(made))])
    return axes


def mistakes(axes: Axes, spans: list[tuple[str, str, float, float]]) -> list[tuple[str, str, float, float]]:
    return [span for span in spans if seen(axes, span[0], (span[2] + span[3]) / 2) != [span[1]]]


def test_timeline_shows_every_span_in_the_row_of_its_engine_and_in_its_color():
    assert mistakes(drawn(SPANS), SPANS) == []


@pytest.mark.parametrize(
    ("change", "num_wrong"),
    [
        (
            lambda engine, doing, begin, end: ("a" if engine == "b" else "b", doing, begin, end),
            4,
        ),  # the others are alike
        (lambda engine, doing, begin, end: (engine, {"train": "idle"}.get(doing, doing), begin, end), 1),
        (
            lambda engine, doing, begin, end: (
                (engine, doing, begin, end) if doing != "waking" else (engine, doing, end, end + 0.2)
            ),
            2,
        ),
    ],
    ids=["engines exchanged", "training called idle", "waking too late"],
)
def test_wrong_spans_make_a_picture_that_is_seen_to_be_wrong(change: Any, num_wrong: int):
    """Guards the test above, which could not fail if it read the spans back instead of the picture."""
    assert len(mistakes(drawn([change(*span) for span in SPANS]), SPANS)) == num_wrong


def test_tenth_engine_comes_after_the_second():
    axes = drawn([(f"engine-{index}", "idle", 0.0, 1.0) for index in (10, 2, 1)])
    assert [text.get_text() for text in axes.get_yticklabels()] == ["engine-1", "engine-2", "engine-10"]
    assert axes.get_yticks()[0] > axes.get_yticks()[2]


def test_spans_of_an_unknown_kind_are_not_left_out_silently():
    with pytest.raises(ValueError, match="places: got dream; must be one of generate, train, idle, waking"):
        drawn([("a", "dream", 0.0, 1.0)])


def test_window_lies_around_the_chosen_step_or_one_of_median_training():
    train_s = {1: 0.0, 2: 0.0, 3: 1.0, 4: 9.0, 5: 2.0, 6: 0.0}
    places = [
        StepSlots(step=step, spans=(SlotSpan(engine="a", doing="train", begin_s=0.0, end_s=s),))
        for step, s in train_s.items()
    ]
    steps = lambda step: [chosen.step for chosen in window_of(places, step)]  # noqa: E731
    assert steps(None) == [4, 5, 6]
    assert [steps(step) for step in (1, 3, 6)] == [[1, 2, 3], [2, 3, 4], [4, 5, 6]]
    assert len(window_of(places[:2], None)) == 2


# Cost, gain and the table.


def test_update_is_held_against_the_last_decision_to_train_before_it(tmp_path: Path):
    """Not against a later step's, nor against that of a step that decided not to train."""
    run = write_run(tmp_path, metrics={4: {"draft/decision": 0.0}})
    first, second = updates_of(read_run(run))
    assert (first.step, first.published, first.expected_gain_s, first.expected_cost_s) == (2, True, 20.0, 0.2)
    assert (second.step, second.published, second.expected_gain_s, second.gain_s) == (4, False, 30.0, -1.5)
    assert np.isnan(second.publish_s)


def test_picture_of_updates_tells_expected_from_measured_and_published_from_refused(tmp_path: Path):
    axes = new_axes()
    draw_updates(axes, updates_of(read_run(write_run(tmp_path))))
    found = lines_of(axes)
    assert found["expected gain"] == ([2, 4], [20.0, 40.0])
    assert found["expected cost"] == ([2, 4], pytest.approx([0.2, 0.4]))
    bars = {bar.get_label(): [(patch.get_x() + 0.3, patch.get_height()) for patch in bar] for bar in axes.containers}
    assert bars == {
        "measured gain, published": [(pytest.approx(2), 6.5)],
        "measured gain, refused": [(pytest.approx(4), -1.5)],
    }


def test_only_refused_updates_are_not_called_a_gain(tmp_path: Path):
    page = write_report(write_run(tmp_path, events=[EVENTS[2]])).read_text()
    assert "No update was better than the drafter in the engines" in page


def test_table_weighs_idle_time_by_seconds_and_finds_the_slowest_recall(tmp_path: Path):
    metrics = {
        3: {"draft/leasable_s": 80.0, "draft/training_s": 70.0, "draft/recall_max_ms": 143.0, "draft/num_recalls": 5.0}
    }
    assert drafter_rows(read_run(write_run(tmp_path, metrics=metrics))) == [
        ("Idle engine time used for training", "85 %, 85 of 100 s"),  # the mean of the steps' shares would be 77 %
        ("Leases recalled", "10"),
        ("Slowest recall", "143 ms"),
        ("Updates", "1 published, 1 refused"),
        ("Drafter lost", "step 5: push again"),
        ("Trainers lost", "step 3: b, killed"),
    ]


@pytest.mark.parametrize(("switched_at", "says"), [(4, "until step 4"), (99, "in every step")])
def test_drafts_from_history_are_told_from_those_of_the_drafter(switched_at: int, says: str, tmp_path: Path):
    metrics = {step: {"draft/learned": float(step >= switched_at)} for step in range(1, 7)}
    events = [*EVENTS, {"step": 4, "what": "drafter_switched"}] if switched_at == 4 else EVENTS
    run = write_run(tmp_path, metrics=metrics, events=events)
    assert dict(drafter_rows(read_run(run)))["Engines drafted from history"] == says
    assert (">switched<" in write_report(run).read_text()) == (switched_at == 4)


def test_speculation_that_was_switched_off_is_said(tmp_path: Path):
    events = [*EVENTS, {"step": 6, "what": "drafter_lost", "remedy": "speculation off"}]
    page = write_report(write_run(tmp_path, events=events, alpha=[*ALPHA[:5], float("nan")])).read_text()
    assert "Speculation was switched off at step 6." in page
