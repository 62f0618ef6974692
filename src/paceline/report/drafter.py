"""Report how drafter training followed the policy: acceptance, use of idle engines, cost and gain of updates.

An update is a candidate drafter that the held-out slice has judged. Its expected gain and cost come from the run's last
decision to train (drafters/drift.py); `gain_s` is the same formula for the gain measured on the held-out slice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.report.plots import (
    BLUE,
    GRAY,
    GREEN,
    INK,
    ORANGE,
    RED,
    SOFT,
    Panel,
    name_rows,
    new_figure,
    new_plot,
    panel,
    row_inches,
    step_axis,
)
from paceline.report.recorded import Floats, RecordedRun, StepSlots, ends
from paceline.report.summary import middle_of, moved, number, percent, smooth, steps_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DOING = {"generate": BLUE, "train": GREEN, "idle": ORANGE, "waking": RED}
"""Colors of a device's uses; idle as in the timeline of rollouts."""
_OUTCOMES = {
    "drafter_lost": ("lost", "D", RED),
    "drafter_refused": ("refused", "x", GRAY),
    "drafter_published": ("published", "^", GREEN),
    "drafter_switched": ("switched", "o", BLUE),
}
_FEW = 5
"""Steps at the end of two compared runs."""


def trained(run: RecordedRun) -> bool:
    return "draft/decision" in run.metrics or any(event["what"] in _OUTCOMES for event in run.events)


def drafter_panels(run: RecordedRun, *, step: int | None = None, against: RecordedRun | None = None) -> list[Panel]:
    """Return no panels for runs that did not train a drafter, unless it is compared with a run that speculates too."""
    if against is not None and not np.isfinite(_alpha(against)).any():
        against = None
    panels: list[Panel] = []
    if (against is not None or trained(run)) and np.isfinite(_alpha(run)).any():
        panels.append(_acceptance_panel(run, against))
    if trained(run) and run.places:
        panels.append(_places_panel(window_of(run.places, step)))
    if updates := updates_of(run):
        panels.append(_updates_panel(run, updates))
    return panels


def drafter_rows(run: RecordedRun) -> list[tuple[str, str]]:
    if not trained(run):
        return []
    leasable_s, training_s = (float(np.nansum(run.series(f"draft/{key}"))) for key in ("leasable_s", "training_s"))
    used = f"{percent(training_s / leasable_s)}, {training_s:,.0f} of {leasable_s:,.0f} s" if leasable_s else "n/a"
    recalls, slowest_ms = run.series("draft/num_recalls"), run.series("draft/recall_max_ms")
    published, refused = (len(_events(run, f"drafter_{outcome}")) for outcome in ("published", "refused"))
    rows = [
        ("Idle engine time used for training", used),
        ("Leases recalled", f"{np.nansum(recalls):.0f}" if np.isfinite(recalls).any() else "n/a"),
        ("Slowest recall", f"{np.nanmax(slowest_ms):.0f} ms" if np.isfinite(slowest_ms).any() else "n/a"),
        ("Updates", f"{published} published, {refused} refused"),
    ]
    if np.isfinite(learned := run.series("draft/learned")).any():
        switched = [step for step, is_learned in zip(run.steps, learned.tolist(), strict=True) if is_learned == 1]
        rows.append(("Engines drafted from history", f"until step {switched[0]}" if switched else "in every step"))
    if lost := _events(run, "drafter_lost"):
        rows.append(("Drafter lost", "; ".join(f"step {e['step']}: {e['remedy']}" for e in lost)))
    if crashed := _events(run, "trainer_lost"):
        rows.append(("Trainers lost", "; ".join(f"step {e['step']}: {e['engine']}, {e['why']}" for e in crashed)))
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
    draw_acceptance(axes, run, run.name, BLUE)
    alpha = _alpha(run)[np.isfinite(_alpha(run))].tolist()
    title = f"Accepted length {moved(*map(middle_of, ends(alpha)))}"
    note = "Tokens per verification, at least 1. Dots are steps, lines the mean of 5 steps."
    steps = list(run.steps)
    if against is not None:
        other = against.name if against.name != run.name else f"{against.name} (other)"
        draw_acceptance(axes, against, other, ORANGE)
        steps += against.steps
        if (ratio := ratio_at_end(run, against)) is not None:
            title += f"; {ratio:.2f} times {other} at the end"
    axes.set(ylabel="accepted length", ylim=(1, None))
    step_axis(strip, min(steps), max(steps))
    if marks:
        note += f" Below: outcomes of the drafter's updates{f' in {run.name}' if against is not None else ''}."
    if off := [event for event in _events(run, "drafter_lost") if event["remedy"] == "speculation off"]:
        note += f" Speculation was switched off at step {off[0]['step']}."
    return panel(figure, title, note)


def draw_acceptance(axes: Axes, run: RecordedRun, name: str, color: str) -> None:
    alpha = _alpha(run)
    axes.plot(run.steps, alpha, "o", color=color, alpha=0.4, markersize=4, markeredgewidth=0)
    line = np.where(np.isfinite(alpha), smooth(alpha), np.nan)  # leave a gap for steps without speculation
    axes.plot(run.steps, line, color=color, linewidth=1.8, label=name)


def draw_marks(axes: Axes, run: RecordedRun, marks: Sequence[str]) -> None:
    """Draw a row per outcome, with a mark at each of its steps."""
    for row, what in enumerate(marks):
        label, marker, color = _OUTCOMES[what]
        steps = [event["step"] for event in _events(run, what)]
        height = [row + 0.44] * len(steps)
        axes.plot(steps, height, marker, color=color, markersize=5, clip_on=False, label=f"_{label}")
    name_rows(axes, [_OUTCOMES[what][0] for what in marks])
    axes.grid(visible=True, axis="y")


def ratio_at_end(run: RecordedRun, against: RecordedRun) -> float | None:
    """Return the ratio of median accepted lengths over the last steps that both runs have."""
    ours, theirs = (
        {s: a for s, a in zip(r.steps, _alpha(r).tolist(), strict=True) if np.isfinite(a)} for r in (run, against)
    )
    shared = sorted(ours.keys() & theirs.keys())[-_FEW:]
    if not shared:
        return None
    return float(np.median([ours[step] for step in shared]) / np.median([theirs[step] for step in shared]))


# Use of the engines.


def window_of(places: Sequence[StepSlots], step: int | None, num_steps: int = 3) -> Sequence[StepSlots]:
    """Return successive steps around `step`, by default around a step of median training time."""
    if step is None:
        by_training = sorted((p for p in places if p.seconds("train") > 0), key=lambda p: p.seconds("train"))
        step = by_training[len(by_training) // 2].step if by_training else places[0].step
    nearest = min(range(len(places)), key=lambda index: abs(places[index].step - step))
    first = max(0, min(nearest - num_steps // 2, len(places) - num_steps))
    return places[first : first + num_steps]


def _places_panel(window: Sequence[StepSlots]) -> Panel:
    num_engines = len({span.engine for places in window for span in places.spans})
    figure, axes = new_plot(1.0 + row_inches(num_engines) * num_engines)
    draw_places(axes, window)
    steps = steps_words(window[0].step, window[-1].step).capitalize()
    share = {doing: sum(places.seconds(doing) for places in window) for doing in DOING}
    train, idle = (percent(share[doing] / sum(share.values())) for doing in ("train", "idle"))
    title = f"{steps}: engines train the drafter for {train} of their time and are idle for {idle}"
    note = "Waking: back from training to rollouts. Engines are also idle while the policy is updated between phases."
    return panel(figure, title, note)


def draw_places(axes: Axes, window: Sequence[StepSlots]) -> None:
    """Draw a row per engine, the first on top, and a line at the start of each step."""
    spans = [span for places in window for span in places.spans]
    if unknown := {span.doing for span in spans} - DOING.keys():
        raise ValueError(f"places: got {', '.join(sorted(unknown))}; must be one of {', '.join(DOING)}")
    engines = sorted({span.engine for span in spans}, key=lambda name: (len(name), name), reverse=True)
    begin_s = min(span.begin_s for span in spans)
    for doing, color in DOING.items():
        label = doing
        alpha = 0.55 if doing == "idle" else 0.85
        edge = 0.8 if doing == "waking" else 0  # keeps a hairline visible
        for row, engine in enumerate(engines):
            mine = [span for span in spans if span.engine == engine and span.doing == doing]
            if bars := [(span.begin_s - begin_s, span.end_s - span.begin_s) for span in mine]:
                axes.broken_barh(bars, (row, 0.88), color=color, linewidth=edge, alpha=alpha, label=label)
                label = "_again"
    for places in window:
        at_s = min(span.begin_s for span in places.spans) - begin_s
        axes.axvline(at_s, color=SOFT, linewidth=0.8, linestyle=":")
        axes.annotate(f" step {places.step}", (at_s, 1), xycoords=("data", "axes fraction"), va="bottom", color=SOFT)
    name_rows(axes, engines)
    axes.set(xlabel="seconds", xlim=(0, max(span.end_s for span in spans) - begin_s))


# Cost and gain.


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterUpdate:
    """A judged candidate. Values that were not recorded are NaN."""

    step: int
    published: bool
    expected_gain_s: float
    expected_cost_s: float
    gain_s: float
    training_s: float
    publish_s: float


def updates_of(run: RecordedRun) -> list[DrafterUpdate]:
    """Return every candidate with the expectations of the last decision to train up to its step."""
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
    figure, axes = new_plot(3.0)
    draw_updates(axes, updates)
    axes.set_ylabel("seconds of generation")
    step_axis(axes, min(run.steps[0], updates[0].step), max(run.steps[-1], updates[-1].step))
    title = "No update was better than the drafter in the engines"
    if published := [update.gain_s for update in updates if update.published]:
        costs = [update.expected_cost_s for update in updates]
        gain, cost = (number(middle_of(values), "{:.1f} s") for values in (published, costs))
        title = f"A published update gains {gain}, at an expected cost of {cost} (median)"
    note = (
        "Seconds of generation saved over the expected life of an update: expected at the decision to train, and "
        "measured on held-out documents."
    )
    training_s, publish_s = middle_of([u.training_s for u in updates]), middle_of([u.publish_s for u in updates])
    if training_s is not None and publish_s is not None:
        note += f" An update took {training_s:.1f} s of training and {publish_s:.2f} s to publish (median)."
    return panel(figure, title, note)


def draw_updates(axes: Axes, updates: Sequence[DrafterUpdate]) -> None:
    for published, color, label in ((True, GREEN, "published"), (False, GRAY, "refused")):
        if mine := [update for update in updates if update.published is published]:
            style = {"color": color, "alpha": 0.75, "linewidth": 0, "label": f"measured gain, {label}"}
            axes.bar([u.step for u in mine], [u.gain_s for u in mine], 0.6, **style)
    steps = [update.step for update in updates]
    expected_gain_s, expected_cost_s = [u.expected_gain_s for u in updates], [u.expected_cost_s for u in updates]
    axes.plot(steps, expected_gain_s, "o", color=INK, markersize=5.5, markerfacecolor="none", label="expected gain")
    axes.plot(steps, expected_cost_s, "_", color=RED, markersize=9, markeredgewidth=2, label="expected cost")
    axes.axhline(0, color=SOFT, linewidth=0.8)
