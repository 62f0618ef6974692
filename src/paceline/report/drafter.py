"""How the drafter followed the policy: pictures and figures for the report of a run that trained its drafter.

An update is one candidate drafter that the held-out slice has judged, published or refused. What was expected of it is
what the run's last decision to train said (drafters/drift.py); `gain_s` is the same formula for the gain that the
held-out slice then showed, so the two can be compared: seconds of generation saved over the horizon of the decision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.report.page import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    RED,
    SOFT,
    Panel,
    name_rows,
    new_figure,
    row_inches,
    step_axis,
    svg,
)
from paceline.report.recorded import Floats, RecordedRun, StepSlots
from paceline.report.summary import middle_of, moved, percent, smooth

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DOING = {"generate": BLUE, "train": GREEN, "idle": ORANGE, "waking": RED}
"""What an engine's device is used for, and its colour. Idle has the colour of the other timeline."""
_OUTCOMES = {
    "drafter_lost": ("lost", "D", RED),
    "drafter_refused": ("refused", "x", GREY),
    "drafter_published": ("published", "^", GREEN),
    "drafter_switched": ("switched", "o", BLUE),
}
_FEW = 5
"""Steps at the beginning and the end of a run that are compared."""


def trained(run: RecordedRun) -> bool:
    return "draft/decision" in run.metrics or any(event["what"] in _OUTCOMES for event in run.events)


def drafter_panels(run: RecordedRun, *, step: int | None = None, against: RecordedRun | None = None) -> list[Panel]:
    """Nothing for a run that did not train its drafter, except a comparison that was asked for."""
    for name, compared in (("run", run), ("against", against)):
        if against is not None and compared is not None and not np.isfinite(_alpha(compared)).any():
            raise ValueError(
                f"{name}: got {compared.name}, which has no accepted length; must be a run with speculation"
            )
    panels: list[Panel] = []
    if against is not None or (trained(run) and np.isfinite(_alpha(run)).any()):
        panels.append(_acceptance_panel(run, against))
    if trained(run) and run.places:
        panels.append(_places_panel(window_of(run.places, step)))
    if updates := updates_of(run):
        panels.append(_updates_panel(run, updates))
    return panels


def drafter_rows(run: RecordedRun) -> list[tuple[str, str]]:
    """A small table: what training used and what came of it."""
    if not trained(run):
        return []
    leasable_s, training_s = (float(np.nansum(run.series(f"draft/{key}"))) for key in ("leasable_s", "training_s"))
    used = f"{percent(training_s / leasable_s)}, {training_s:,.0f} of {leasable_s:,.0f} s" if leasable_s else "n/a"
    recalls, slowest_ms = run.series("draft/num_recalls"), run.series("draft/recall_max_ms")
    rows = [
        ("Idle engine time used for training", used),
        ("Leases recalled", f"{np.nansum(recalls):.0f}" if np.isfinite(recalls).any() else "n/a"),
        ("Slowest recall", f"{np.nanmax(slowest_ms):.0f} ms" if np.isfinite(slowest_ms).any() else "n/a"),
        (
            "Updates",
            f"{len(_events(run, 'drafter_published'))} published, {len(_events(run, 'drafter_refused'))} refused",
        ),
    ]
    if np.isfinite(learned := run.series("draft/learned")).any():
        switched = [step for step, is_learned in zip(run.steps, learned.tolist(), strict=True) if is_learned == 1]
        rows.append(("Engines drafted from history", f"until step {switched[0]}" if switched else "in every step"))
    if lost := _events(run, "drafter_lost"):
        rows.append(("Drafter lost", "; ".join(f"step {event['step']}: {event['remedy']}" for event in lost)))
    if crashed := _events(run, "trainer_lost"):
        rows.append(
            (
                "Trainers lost",
                "; ".join(f"step {event['step']}: {event['engine']}, {event['why']}" for event in crashed),
            )
        )
    return rows


def _events(run: RecordedRun, what: str) -> list[Mapping[str, Any]]:
    return [event for event in run.events if event["what"] == what]


def _alpha(run: RecordedRun) -> Floats:
    return run.series("rollout/accepted_length")


# Accepted length over the steps.


def _acceptance_panel(run: RecordedRun, against: RecordedRun | None) -> Panel:
    marks = [what for what in _OUTCOMES if _events(run, what)]
    strip_inches = 0.2 * len(marks)
    figure = new_figure(3.0 + strip_inches)
    if marks:
        axes, strip = figure.subplots(2, 1, sharex=True, height_ratios=[2.4, strip_inches])
        draw_marks(strip, run, marks)
    else:
        axes = strip = figure.add_subplot()
    other_name = "" if against is None else against.name if against.name != run.name else f"{against.name} (other)"
    draw_acceptance(axes, run, run.name, BLUE)
    steps = list(run.steps)
    if against is not None:
        draw_acceptance(axes, against, other_name, ORANGE)
        steps += against.steps
    axes.set_ylabel("accepted length")
    axes.set_ylim(bottom=1)
    step_axis(strip, min(steps), max(steps))
    figure.legend(loc="outside upper left", ncols=2)
    alpha = _alpha(run)[np.isfinite(_alpha(run))]
    few = max(1, min(_FEW, len(alpha) // 2))
    title = f"Accepted length {moved(middle_of(alpha[:few]), middle_of(alpha[few:][-few:]))}"
    if against is not None and (ratio := ratio_at_end(run, against)) is not None:
        title += f"; at the end it is {ratio:.2f} times that of {other_name}"
    note = "Tokens per verification in the rollouts of a step; 1 is no gain. Dots are steps, lines the mean of 5 steps."
    if marks:
        note += f" Below, what became of the drafter's updates{f' in {run.name}' if against is not None else ''}."
    if off := [event for event in _events(run, "drafter_lost") if event["remedy"] == "speculation off"]:
        note += f" Speculation was switched off at step {off[0]['step']}."
    return Panel(title=title, note=note, svg=svg(figure, title))


def draw_acceptance(axes: Axes, run: RecordedRun, name: str, colour: str) -> None:
    alpha = _alpha(run)
    axes.plot(run.steps, alpha, "o", color=colour, alpha=0.4, markersize=4, markeredgewidth=0)
    line = np.where(
        np.isfinite(alpha), smooth(alpha), np.nan
    )  # a step without speculation is a gap in the line as well
    axes.plot(run.steps, line, color=colour, linewidth=1.8, label=name)


def draw_marks(axes: Axes, run: RecordedRun, marks: Sequence[str]) -> None:
    """A row for each outcome, a mark where it came about."""
    for row, what in enumerate(marks):
        label, marker, colour = _OUTCOMES[what]
        steps = [event["step"] for event in _events(run, what)]
        axes.plot(
            steps, [row + 0.44] * len(steps), marker, color=colour, markersize=5, clip_on=False, label=f"_{label}"
        )
    name_rows(axes, [_OUTCOMES[what][0] for what in marks])
    axes.grid(visible=True, axis="y")


def ratio_at_end(run: RecordedRun, against: RecordedRun) -> float | None:
    """Accepted length over that of the other run in the last steps that both have, by medians."""
    ours, theirs = (
        {s: a for s, a in zip(r.steps, _alpha(r).tolist(), strict=True) if np.isfinite(a)} for r in (run, against)
    )
    shared = sorted(ours.keys() & theirs.keys())[-_FEW:]
    if not shared:
        return None
    return float(np.median([ours[step] for step in shared]) / np.median([theirs[step] for step in shared]))


# What engines did.


def window_of(places: Sequence[StepSlots], step: int | None, num_steps: int = 3) -> Sequence[StepSlots]:
    """Successive steps around `step`; by default around the one of median training time among those that trained."""
    if step is None:
        by_training = sorted((p for p in places if p.seconds("train") > 0), key=lambda p: p.seconds("train"))
        step = by_training[len(by_training) // 2].step if by_training else places[0].step
    nearest = min(range(len(places)), key=lambda index: abs(places[index].step - step))
    first = max(0, min(nearest - num_steps // 2, len(places) - num_steps))
    return places[first : first + num_steps]


def _places_panel(window: Sequence[StepSlots]) -> Panel:
    num_engines = len({span.engine for places in window for span in places.spans})
    figure = new_figure(1.0 + row_inches(num_engines) * num_engines)
    axes = figure.add_subplot()
    draw_places(axes, window)
    figure.legend(loc="outside upper left", ncols=4, handlelength=1)
    steps = f"Step {window[0].step}" if len(window) == 1 else f"Steps {window[0].step} to {window[-1].step}"
    share = {doing: sum(places.seconds(doing) for places in window) for doing in DOING}
    whole = sum(share.values())
    title = f"{steps}: engines train the drafter for {percent(share['train'] / whole)} of their time "
    title += f"and are idle for {percent(share['idle'] / whole)}"
    note = (
        "Waking is the way back from training to rollouts. Engines are idle too while the policy is updated between "
        "phases."
    )
    return Panel(title=title, note=note, svg=svg(figure, title))


def draw_places(axes: Axes, window: Sequence[StepSlots]) -> None:
    """A row for each engine, the first on top; a line where a step begins."""
    spans = [span for places in window for span in places.spans]
    if unknown := {span.doing for span in spans} - DOING.keys():
        raise ValueError(f"places: got {', '.join(sorted(unknown))}; must be one of {', '.join(DOING)}")
    engines = sorted(
        {span.engine for span in spans}, key=lambda name: (len(name), name), reverse=True
    )  # engine-2 before engine-10
    begin_s = min(span.begin_s for span in spans)
    for doing, colour in DOING.items():
        label = doing
        for row, engine in enumerate(engines):
            mine = [span for span in spans if span.engine == engine and span.doing == doing]
            bars = [(span.begin_s - begin_s, span.end_s - span.begin_s) for span in mine]
            if bars:
                alpha, edge = (
                    (0.55 if doing == "idle" else 0.85),
                    (0.8 if doing == "waking" else 0),
                )  # a hairline must be seen
                axes.broken_barh(bars, (row, 0.88), color=colour, linewidth=edge, alpha=alpha, label=label)
                label = "_again"
    for places in window:
        at_s = min(span.begin_s for span in places.spans) - begin_s
        axes.axvline(at_s, color=SOFT, linewidth=0.8, linestyle=":")
        axes.annotate(f" step {places.step}", (at_s, 1), xycoords=("data", "axes fraction"), va="bottom", color=SOFT)
    name_rows(axes, engines)
    axes.set_xlim(0, max(span.end_s for span in spans) - begin_s)
    axes.set_xlabel("seconds")


# Cost and gain.


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterUpdate:
    """A judged candidate; NaN for what was not recorded."""

    step: int
    published: bool
    expected_gain_s: float
    expected_cost_s: float
    gain_s: float
    training_s: float
    publish_s: float


def updates_of(run: RecordedRun) -> list[DrafterUpdate]:
    """Every candidate with what the last decision to train, of its own step or before, expected of it."""
    steps = np.array(run.steps)
    decided = run.series("draft/decision") == 1
    expected_gain_s, expected_cost_s = (run.series(f"draft/expected_{what}_s") for what in ("gain", "cost"))
    updates: list[DrafterUpdate] = []
    for event in run.events:
        if event["what"] not in ("drafter_published", "drafter_refused"):
            continue
        rows = np.flatnonzero(decided & (steps <= event["step"]))
        updates.append(
            DrafterUpdate(
                step=event["step"],
                published=event["what"] == "drafter_published",
                expected_gain_s=float(expected_gain_s[rows[-1]]) if len(rows) else np.nan,
                expected_cost_s=float(expected_cost_s[rows[-1]]) if len(rows) else np.nan,
                gain_s=event.get("gain_s", np.nan),
                training_s=event.get("training_s", np.nan),
                publish_s=event.get("publish_s", np.nan),
            )
        )
    return updates


def _updates_panel(run: RecordedRun, updates: Sequence[DrafterUpdate]) -> Panel:
    figure = new_figure(3.0)
    axes = figure.add_subplot()
    draw_updates(axes, updates)
    axes.set_ylabel("seconds of generation")
    step_axis(axes, min(run.steps[0], updates[0].step), max(run.steps[-1], updates[-1].step))
    figure.legend(loc="outside upper left", ncols=4)
    gain_s = middle_of(np.array([update.gain_s for update in updates if update.published]))
    cost_s = middle_of(np.array([update.expected_cost_s for update in updates]))
    title = "No update was better than the drafter in the engines"
    if any(update.published for update in updates):
        title = f"A published update gains {_seconds(gain_s)}, at an expected cost of {_seconds(cost_s)} (median)"
    note = (
        "Seconds of generation saved over the steps that an update is expected to last, at the gain expected when "
        "training was "
    )
    note += "decided and at the gain measured on held-out documents."
    training_s = middle_of(np.array([update.training_s for update in updates]))
    publish_s = middle_of(np.array([update.publish_s for update in updates]))
    if training_s is not None and publish_s is not None:
        note += f" An update took {training_s:.1f} s of training and {publish_s:.2f} s to publish (median)."
    return Panel(title=title, note=note, svg=svg(figure, title))


def _seconds(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.1f} s"


def draw_updates(axes: Axes, updates: Sequence[DrafterUpdate]) -> None:
    for published, colour, label in (
        (True, GREEN, "measured gain, published"),
        (False, GREY, "measured gain, refused"),
    ):
        if mine := [update for update in updates if update.published is published]:
            axes.bar(
                [u.step for u in mine],
                [u.gain_s for u in mine],
                0.6,
                color=colour,
                alpha=0.75,
                linewidth=0,
                label=label,
            )
    steps = [update.step for update in updates]
    expected_gain_s, expected_cost_s = [u.expected_gain_s for u in updates], [u.expected_cost_s for u in updates]
    axes.plot(steps, expected_gain_s, "o", color=INK, markersize=5.5, markerfacecolor="none", label="expected gain")
    axes.plot(steps, expected_cost_s, "_", color=RED, markersize=9, markeredgewidth=2, label="expected cost")
    axes.axhline(0, color=SOFT, linewidth=0.8)
