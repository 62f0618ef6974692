"""Write the report of a run: metrics.jsonl as one HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.report.draft_length import draft_length_panels
from paceline.report.drafter import drafter_panels, drafter_rows
from paceline.report.equality import compare_tokens, equality_panel
from paceline.report.mismatch import mismatch_panels, scale_panels
from paceline.report.plots import (
    BLUE,
    BROWN,
    GRAY,
    GREEN,
    ORANGE,
    PINK,
    RED,
    SKY,
    YELLOW,
    Panel,
    drawing,
    name_rows,
    new_figure,
    new_plot,
    panel,
    row_inches,
    step_axis,
)
from paceline.report.recorded import Floats, Interval, RecordedRun, StepRollouts, ends, read_run
from paceline.report.render import write_page
from paceline.report.summary import (
    RunSummary,
    failure_rows,
    in_flight,
    middle_of,
    moved,
    occupancy,
    percent,
    smooth,
    steps_words,
    subtract,
    summary,
    truncated_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STAGES = {
    "generation": BLUE,
    "train": ORANGE,
    "logprob": SKY,
    "sync": RED,
    "calibrate": YELLOW,
    "draft": BROWN,
    "prepare": GREEN,
    "data": PINK,
    "eval": GRAY,
}


def write_report(run_dir: Path, *, step: int | None = None, against: Path | None = None) -> Path:
    """Write run_dir/report.html. Timelines show `step`, by default a step of median duration; tokens, rewards
    and accepted length are compared with the run `against`."""
    with drawing():
        run = read_run(run_dir)
        other = None if against is None else read_run(against)
        figures = summary(run)
        chosen = _choose_step(run, step)
        panels = [learning_panel(run, figures), _stages_panel(run, figures)]
        if against is not None and other is not None and (found := compare_tokens(run_dir, against)).num_rollouts:
            panels.insert(0, equality_panel(run, other, found))
        if chosen is not None:
            remark = " This is the step of median generation time." if step is None else ""
            panels += [_lengths_panel(run), _timeline_panel(run, chosen, remark)]
        panels += draft_length_panels(run, step)
        panels += drafter_panels(run, step=step, against=other)
        panels += [*mismatch_panels(run), _sync_panel(run), *scale_panels(run)]
    path = run_dir / "report.html"
    write_page(
        path,
        "run.html",
        run=run,
        figures=figures,
        panels=panels,
        failures=failure_rows(run),
        training=drafter_rows(run),
        answers=_answers(run),
        events=[_event_row(event) for event in run.events],
    )
    return path


def _answers(run: RecordedRun) -> list[tuple[str, str]]:
    ends = {record["step"]: record for record in (*run.texts[:1], *run.texts[-1:])}
    return [
        (f"step {step}, {text['which']}, reward {text['reward']:g}", f"{text['prompt']}\n{text['completion']}".strip())
        for step, record in ends.items()
        for text in record["texts"]
    ]


def _event_row(event: Mapping[str, Any]) -> tuple[str, str]:
    rest = ", ".join(f"{key} {value}" for key, value in event.items() if key not in ("what", "time_s"))
    return f"{event['time_s']:.1f} s", f"{event['what'].replace('_', ' ')}: {rest}"


def _choose_step(run: RecordedRun, step: int | None) -> StepRollouts | None:
    if step is None:
        shown = run.whole_phases() or run.rollouts
        by_duration = sorted(shown, key=lambda batch: batch.window[1] - batch.window[0])
        return by_duration[len(by_duration) // 2] if by_duration else None
    found = {batch.step: batch for batch in run.rollouts}
    if step not in found:
        raise ValueError(f"step: got {step}; must be one of the recorded steps, {_ranges(sorted(found))}")
    return found[step]


def _ranges(steps: Sequence[int]) -> str:
    """Abbreviate successive steps: 1 to 8, 17 to 24."""
    begins = [step for step in steps if step - 1 not in steps]
    ends = [step for step in steps if step + 1 not in steps]
    return ", ".join(f"{begin} to {end}" for begin, end in zip(begins, ends, strict=True)) or "none"


# Plots.


def _step_axis(axes: Axes, run: RecordedRun) -> None:
    step_axis(axes, 0 if run.evals and run.evals[0][0] == 0 else run.steps[0], run.steps[-1])


def learning_panel(run: RecordedRun, figures: RunSummary) -> Panel:
    figure, axes = new_plot(3.0)
    steps, reward = np.array(run.steps), run.series("reward/mean")
    axes.plot(steps, reward, "o", color=SKY, markersize=4, markeredgewidth=0, label="reward of a step")
    if len(steps) >= 5:
        axes.plot(steps, smooth(reward), color=BLUE, linewidth=1.8, label="mean of 5 steps")
    axes.set_ylabel("mean reward")
    note = "Reward is the mean over the rollouts of a step."
    title = f"Reward {moved(figures.reward_start, figures.reward_end)}"
    if run.evals:
        title += f"; held-out accuracy {moved(figures.accuracy_start, figures.accuracy_end)}"
        if _draw_accuracy(axes, run, reward[np.isfinite(reward)]):
            note += " Whiskers: 95 % interval over held-out prompts."
    _step_axis(axes, run)
    return panel(figure, title, note)


def _draw_accuracy(axes: Axes, run: RecordedRun, reward: Floats) -> bool:
    """Draw accuracy on the axis of rewards from 0 to 1, or on its own; return whether it has intervals."""
    if not len(reward) or (reward.min() >= 0 and reward.max() <= 1):
        axes.set_ylabel("mean reward, accuracy")
    else:
        axes = axes.twinx()
        axes.set_ylabel("held-out accuracy")
        axes.grid(visible=False)
    steps, accuracy = (np.array(column) for column in zip(*run.evals, strict=True))
    errors = _interval_95(accuracy, run.config.get("eval", {}).get("num_prompts"))
    style = {"fmt": "s-", "color": RED, "linewidth": 1.2, "markersize": 4.5, "capsize": 2}
    axes.errorbar(steps, accuracy, errors, label="held-out accuracy", **style)
    return errors is not None


def _interval_95(accuracy: Floats, num_prompts: int | None) -> Floats | None:
    """Return half the width of a share's normal interval; None for other values or an unknown number of prompts."""
    if not num_prompts or not ((accuracy >= 0) & (accuracy <= 1)).all():
        return None
    return 1.96 * np.sqrt(accuracy * (1 - accuracy) / num_prompts)


def _stages_panel(run: RecordedRun, figures: RunSummary) -> Panel:
    figure, axes = new_plot(3.0)
    steps = np.array(run.steps, dtype=np.float64)
    edges = np.append(steps - 0.5, steps[-1] + 0.5)
    base = np.zeros(len(steps))
    total = np.nansum(run.series("time/step"))
    for stage, color in _STAGES.items():
        values = np.nan_to_num(run.series(f"time/{stage}"))
        if values.any():
            label = f"{stage} {percent(values.sum() / total)}" if total else stage
            axes.stairs(base + values, edges, baseline=base, fill=True, color=color, linewidth=0, label=label)
            base = base + values
    _step_axis(axes, run)
    axes.set(ylabel="seconds", xlim=(edges[0], edges[-1]), ylim=(0, None))
    title = f"Generation takes {percent(figures.generation_share)} of the time of a step"
    note = "Seconds of each stage; shares are of the whole run."
    if run.config.get("run", {}).get("max_age"):
        note += " Engines work ahead in this run: generation is the learner's wait for groups."
    return panel(figure, title, note, columns=7)


def length_histogram(lengths: Sequence[Sequence[int]], num_bins: int = 40) -> tuple[list[int], list[list[float]]]:
    """Return edges in whole tokens, shared by all sets, and each set's share of rollouts per bin."""
    longest = max(max(values) for values in lengths)
    width = -(-(longest + 1) // num_bins)
    edges = list(range(0, longest + 1 + width, width))
    return edges, [(np.histogram(values, edges)[0] / len(values)).tolist() for values in lengths]


def _lengths_panel(run: RecordedRun) -> Panel:
    figure, axes = new_plot(3.0)
    parts = [part for part in ends(run.rollouts) if part]
    lengths = [np.concatenate([batch.length for batch in part]) for part in parts]
    edges, shares = length_histogram([values.tolist() for values in lengths])
    floor = 0.5 / max(len(values) for values in lengths)  # half a rollout: a bin of one is visible, an empty one is not
    for part, values, share, color in zip(parts, lengths, shares, (BLUE, ORANGE), strict=False):
        median, p99 = np.median(values), np.quantile(values, 0.99)
        steps = steps_words(part[0].step, part[-1].step)
        label = f"{steps}: median {median:.0f}, p99 {p99:.0f}, longest {values.max()}"
        if (cut := truncated_of(run, part)) is not None:
            label += f", {percent(cut)} truncated"
        heights = 100 * np.maximum(share, floor)
        if part is parts[0]:  # two fills would mix into a third color
            axes.stairs(heights, edges, baseline=100 * floor, fill=True, color=color, alpha=0.3)
        axes.stairs(heights, edges, baseline=100 * floor, color=color, linewidth=1.6, label=label)
    axes.set(yscale="log", xlabel="response length, tokens", ylabel="share of rollouts, %")
    axes.set(xlim=(0, edges[-1]), ylim=(100 * floor, None))
    times = lengths[-1].max() / max(1.0, float(np.median(lengths[-1])))
    title = f"The longest response has {times:.0f} times the tokens of the median one"
    note = f"Bins of {edges[1]} tokens; the logarithmic scale keeps single long responses visible."
    return panel(figure, title, note, columns=1)


def _timeline_panel(run: RecordedRun, chosen: StepRollouts, remark: str) -> Panel:
    """Plot rollouts in flight over one generation phase: all engines, then each, the last to finish on top."""
    window = chosen.window
    batches = [batch for batch in run.rollouts if batch.window[0] < window[1] and batch.window[1] > window[0]]
    found = occupancy(batches, within=window, evals=run.eval_intervals)
    last_busy = {engine: (intervals[-1][0] if intervals else window[1]) for engine, intervals in found.idle.items()}
    engines = sorted(found.idle, key=lambda engine: (last_busy[engine], engine))
    rows_inches = row_inches(len(engines)) * len(engines)
    figure = new_figure(1.9 + rows_inches)
    top, rows = figure.subplots(2, 1, sharex=True, height_ratios=[1.1, rows_inches])
    _draw_fleet(top, batches, window, found.tail)
    most = _draw_engines(rows, batches, window, {engine: found.idle[engine] for engine in engines})
    title = (
        f"Step {chosen.step}: for {percent(found.tail_share)} of the generation some engine is idle, "
        f"{percent(found.idle_share)} of engine time is lost"
    )
    half_s, last_s = float(np.median(chosen.end_s)) - window[0], window[1] - window[0]
    note = (
        f"Half of the {len(chosen.length)} rollouts finished within {half_s:.1f} s, the last after {last_s:.1f} s. "
        f"The full height of an engine's row is {most} rollouts in flight.{remark}"
    )
    return panel(figure, title, note)


def _draw_fleet(axes: Axes, batches: Sequence[StepRollouts], window: Interval, tail: Sequence[Interval]) -> None:
    edges, counts = in_flight(batches, window)
    axes.stairs(counts, edges - window[0], fill=True, color=BLUE, alpha=0.85, label="rollouts in flight")
    for number, (start, end) in enumerate(tail):
        label = "tail: some engine is idle" if number == 0 else None
        axes.axvspan(start - window[0], end - window[0], color=ORANGE, alpha=0.28, linewidth=0, zorder=0, label=label)
    axes.set(ylabel="all engines", xlim=(0, window[1] - window[0]), ylim=(0, None))


def _draw_engines(
    axes: Axes, batches: Sequence[StepRollouts], window: Interval, idle_of: Mapping[str, Sequence[Interval]]
) -> int:
    """Draw a row per engine from the bottom; return the number of rollouts that fills a row's height."""
    curves = {engine: in_flight(batches, window, engine) for engine in idle_of}
    most = max(1, *(int(counts.max()) for _, counts in curves.values()))
    for row, (engine, idle) in enumerate(idle_of.items()):
        edges, counts = curves[engine]
        # A pale bar behind the curve keeps an engine with one rollout of many from looking idle.
        for what, intervals, color, alpha in (
            ("busy", subtract([window], idle), BLUE, 0.16),
            ("idle", idle, ORANGE, 0.55),
        ):
            bars = [(start - window[0], end - start) for start, end in intervals]
            label = f"this engine is {what}" if row == 0 else None
            axes.broken_barh(bars, (row, 0.88), facecolor=color, alpha=alpha, linewidth=0, label=label)
        axes.stairs(row + 0.88 * counts / most, edges - window[0], baseline=row, fill=True, color=BLUE, alpha=0.85)
    name_rows(axes, list(idle_of))
    axes.set_xlabel("seconds since the generation began")
    return most


def _sync_panel(run: RecordedRun) -> Panel:
    seconds, num_bytes = run.series("sync/seconds"), middle_of(run.series("sync/bytes"))
    typical = middle_of(seconds)
    title = "No sync was recorded" if typical is None else f"A sync takes {typical:.2f} s (median)"
    note = "Slowest engine of each sync."
    if num_bytes is not None:
        note += f" {num_bytes / 1e6:,.1f} MB of weights per engine."
    figure, axes = new_plot(2.5, half=True)
    size = 3 if len(run.steps) <= 60 else 0
    axes.plot(run.steps, seconds, color=BLUE, linewidth=1.4, marker="o", markersize=size)
    if typical is not None:
        axes.set_ylim(0, 1.15 * np.nanmax(seconds) or 1.0)
    axes.set_ylabel("seconds")
    _step_axis(axes, run)
    return panel(figure, title, note)
