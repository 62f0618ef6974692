"""metrics.jsonl -> one HTML page that says how a run went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.report.draft_length import draft_length_panels
from paceline.report.drafter import drafter_panels, drafter_rows
from paceline.report.failures import NO_FAILURES, failure_rows
from paceline.report.mismatch import mismatch_panels, scale_panels
from paceline.report.page import (
    BLUE,
    BROWN,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    RED,
    SKY,
    YELLOW,
    Card,
    Panel,
    drawing,
    flat,
    name_rows,
    new_figure,
    row_inches,
    step_axis,
    svg,
    table,
    write_page,
)
from paceline.report.recorded import Floats, Interval, RecordedRun, StepRollouts, read_run
from paceline.report.summary import (
    RunSummary,
    in_flight,
    middle_of,
    moved,
    occupancy,
    percent,
    smooth,
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
    "eval": GREY,
}


def write_report(run_dir: Path, *, step: int | None = None, against: Path | None = None) -> Path:
    """Write run_dir/report.html. Timelines show `step`, by default a median one; `against` is a run to compare accepted
    length with."""
    with drawing():
        run = read_run(run_dir)
        other = None if against is None else read_run(against)
        figures = summary(run)
        chosen = _choose_step(run, step)
        panels = [learning_panel(run, figures), _stages_panel(run, figures)]
        if chosen is not None:
            remark = " Shown is the step of median generation time." if step is None else ""
            panels += [_lengths_panel(run), _timeline_panel(run, chosen, remark)]
        panels += draft_length_panels(run, step)
        panels += drafter_panels(run, step=step, against=other)
        panels += [*mismatch_panels(run), _sync_panel(run), *scale_panels(run)]
    unfinished = figures.planned_steps is not None and figures.num_steps < figures.planned_steps
    failures = failure_rows(run)
    path = run_dir / "report.html"
    write_page(
        path,
        name=run.name,
        subtitle=(str(run.config.get("policy", {}).get("model", "")), run.started),
        state="This run is still going or was stopped: the page shows what has been recorded." if unfinished else "",
        cards=[Card(label=h.label, value=h.value, note=h.note) for h in figures.headlines()],
        panels=panels,
        tables=table("Failures that did not end the run", failures, is_open=failures != NO_FAILURES)
        + table("Drafter training", drafter_rows(run), is_open=True)
        + table("Answers to held-out prompts, at the first and the last evaluation", _text_rows(run))
        + table("Events", [(_event_time(e), _event_text(e)) for e in run.events])
        + table("Config", flat(run.config))
        + table("Environment", flat(run.environment)),
    )
    return path


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
    """Name runs of successive steps: 1 to 8, 17 to 24."""
    begins = [step for step in steps if step - 1 not in steps]
    ends = [step for step in steps if step + 1 not in steps]
    return ", ".join(f"{begin} to {end}" for begin, end in zip(begins, ends, strict=True)) or "none"


# The pictures.


def _step_axis(axes: Axes, run: RecordedRun) -> None:
    step_axis(axes, 0 if run.evals and run.evals[0][0] == 0 else run.steps[0], run.steps[-1])


def learning_panel(run: RecordedRun, figures: RunSummary) -> Panel:
    """Draw reward and held-out accuracy over the steps of a run."""
    figure = new_figure(3.0)
    axes = figure.add_subplot()
    steps, reward = np.array(run.steps), run.series("reward/mean")
    axes.plot(steps, reward, "o", color=SKY, markersize=4, markeredgewidth=0, label="reward of a step")
    if len(steps) >= 5:
        axes.plot(steps, smooth(reward), color=BLUE, linewidth=1.8, label="mean of 5 steps")
    axes.set_ylabel("mean reward")
    note = "Reward is the mean over the rollouts of a step."
    if run.evals:
        finite = reward[np.isfinite(reward)]
        shared = not len(finite) or (finite.min() >= 0 and finite.max() <= 1)
        right = axes if shared else axes.twinx()
        axes.set_ylabel("mean reward, accuracy" if shared else "mean reward")
        if not shared:
            right.set_ylabel("held-out accuracy")
            right.grid(visible=False)
        x, accuracy = np.array([e[0] for e in run.evals]), np.array([e[1] for e in run.evals])
        errors = _interval_95(accuracy, run.config.get("eval", {}).get("num_prompts"))
        right.errorbar(
            x,
            accuracy,
            errors,
            fmt="s-",
            color=RED,
            linewidth=1.2,
            markersize=4.5,
            capsize=2,
            label="held-out accuracy",
        )
        if errors is not None:
            note += " Whiskers: 95 % interval over held-out prompts."
    _step_axis(axes, run)
    figure.legend(loc="outside upper left", ncols=3)
    title = f"Reward {moved(figures.reward_start, figures.reward_end)}"
    if run.evals:
        title += f"; held-out accuracy {moved(figures.accuracy_start, figures.accuracy_end)}"
    return Panel(title=title, note=note, svg=svg(figure, title))


def _interval_95(accuracy: Floats, num_prompts: int | None) -> Floats | None:
    """Half width of the normal interval of a share. None where it is not one, or where the number of prompts is not
    recorded."""
    if not num_prompts or not ((accuracy >= 0) & (accuracy <= 1)).all():
        return None
    return 1.96 * np.sqrt(accuracy * (1 - accuracy) / num_prompts)


def _stages_panel(run: RecordedRun, figures: RunSummary) -> Panel:
    figure = new_figure(3.0)
    axes = figure.add_subplot()
    steps = np.array(run.steps, dtype=np.float64)
    edges = np.append(steps - 0.5, steps[-1] + 0.5)
    base = np.zeros(len(steps))
    total = np.nansum(run.series("time/step"))
    for stage, colour in _STAGES.items():
        values = np.nan_to_num(run.series(f"time/{stage}"))
        if values.any():
            label = f"{stage} {percent(values.sum() / total)}" if total else stage
            axes.stairs(base + values, edges, baseline=base, fill=True, color=colour, linewidth=0, label=label)
            base = base + values
    axes.set_ylabel("seconds")
    axes.set_ylim(bottom=0)
    _step_axis(axes, run)
    axes.set_xlim(edges[0], edges[-1])
    figure.legend(loc="outside upper left", ncols=7, handlelength=1, columnspacing=1.2)
    title = f"Generation takes {percent(figures.generation_share)} of the time of a step"
    note = "Seconds of each stage; shares are of the whole run."
    if run.config.get("run", {}).get("max_age"):
        note += " Engines work ahead in this run: generation is the time that the learner waited for groups."
    return Panel(title=title, note=note, svg=svg(figure, title))


def length_histogram(lengths: Sequence[Sequence[int]], num_bins: int = 40) -> tuple[list[int], list[list[float]]]:
    """Edges that all sets share, in whole tokens, and for each set the share of its rollouts in each bin."""
    longest = max(max(values) for values in lengths)
    width = -(-(longest + 1) // num_bins)
    edges = list(range(0, longest + 1 + width, width))
    return edges, [(np.histogram(values, edges)[0] / len(values)).tolist() for values in lengths]


def _lengths_panel(run: RecordedRun) -> Panel:
    figure = new_figure(3.0)
    axes = figure.add_subplot()
    parts = [part for part in run.first_and_last() if part]
    lengths = [np.concatenate([batch.length for batch in part]) for part in parts]
    edges, shares = length_histogram([values.tolist() for values in lengths])
    floor = 0.5 / max(len(values) for values in lengths)  # half a rollout: a bin of one is seen, an empty one is not
    for part, values, share, colour in zip(parts, lengths, shares, (BLUE, ORANGE), strict=False):
        median, p99 = np.median(values), np.quantile(values, 0.99)
        label = f"{_steps_label(part)}: median {median:.0f}, p99 {p99:.0f}, longest {values.max()}"
        if (cut := truncated_of(run, part)) is not None:
            label += f", {percent(cut)} truncated"
        heights = 100 * np.maximum(share, floor)
        if part is parts[0]:  # only one is filled: two fills would mix into a third colour
            axes.stairs(heights, edges, baseline=100 * floor, fill=True, color=colour, alpha=0.3)
        axes.stairs(heights, edges, baseline=100 * floor, color=colour, linewidth=1.6, label=label)
    axes.set_yscale("log")
    axes.set_ylim(bottom=100 * floor)
    axes.set_xlim(0, edges[-1])
    axes.set_xlabel("response length, tokens")
    axes.set_ylabel("share of rollouts, %")
    figure.legend(loc="outside upper left", ncols=1)
    last = lengths[-1]
    times = last.max() / max(1.0, float(np.median(last)))
    title = f"The longest response has {times:.0f} times the tokens of the median one"
    note = f"Bins of {edges[1]} tokens; the scale of shares is logarithmic, so that a single long response is seen."
    return Panel(title=title, note=note, svg=svg(figure, title))


def _steps_label(part: Sequence[StepRollouts]) -> str:
    return f"step {part[0].step}" if len(part) == 1 else f"steps {part[0].step} to {part[-1].step}"


def _timeline_panel(run: RecordedRun, chosen: StepRollouts, remark: str) -> Panel:
    """Rollouts in flight over one generation phase: all engines above, a row for each below, those that finish last on
    top."""
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
    handles, labels = top.get_legend_handles_labels()
    row_handles, row_labels = rows.get_legend_handles_labels()
    figure.legend(handles + row_handles, labels + row_labels, loc="outside upper left", ncols=4, handlelength=1)
    title = (
        f"Step {chosen.step}: for {percent(found.tail_share)} of the generation some engine is idle, "
        f"{percent(found.idle_share)} of engine time is lost"
    )
    half_s, last_s = float(np.median(chosen.end_s)) - window[0], window[1] - window[0]
    note = (
        f"Half of the {len(chosen.length)} rollouts were done after {half_s:.1f} s, the last one after {last_s:.1f} s. "
    )
    note += f"The full height of an engine's row is {most} rollouts in flight.{remark}"
    return Panel(title=title, note=note, svg=svg(figure, title))


def _draw_fleet(axes: Axes, batches: Sequence[StepRollouts], window: Interval, tail: Sequence[Interval]) -> None:
    edges, counts = in_flight(batches, window)
    axes.stairs(counts, edges - window[0], fill=True, color=BLUE, alpha=0.85, label="rollouts in flight")
    for number, (start, end) in enumerate(tail):
        label = "tail: some engine is idle" if number == 0 else None
        axes.axvspan(start - window[0], end - window[0], color=ORANGE, alpha=0.28, linewidth=0, zorder=0, label=label)
    axes.set_ylabel("all engines")
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, window[1] - window[0])


def _draw_engines(
    axes: Axes, batches: Sequence[StepRollouts], window: Interval, idle_of: Mapping[str, Sequence[Interval]]
) -> int:
    """A row for each engine, in this order from the bottom; returns how many rollouts fill a row's height."""
    curves = {engine: in_flight(batches, window, engine) for engine in idle_of}
    most = max(1, *(int(counts.max()) for _, counts in curves.values()))
    for row, (engine, idle) in enumerate(idle_of.items()):
        edges, counts = curves[engine]
        # A pale bar behind the curve: one rollout of many is a hairline, and a busy engine must not look like an idle
        # one.
        busy = [(start - window[0], end - start) for start, end in subtract([window], idle)]
        axes.broken_barh(
            busy,
            (row, 0.88),
            facecolor=BLUE,
            alpha=0.16,
            linewidth=0,
            label="this engine is busy" if row == 0 else None,
        )
        axes.stairs(row + 0.88 * counts / most, edges - window[0], baseline=row, fill=True, color=BLUE, alpha=0.85)
        bars = [(start - window[0], end - start) for start, end in idle]
        axes.broken_barh(
            bars,
            (row, 0.88),
            facecolor=ORANGE,
            alpha=0.55,
            linewidth=0,
            label="this engine is idle" if row == 0 else None,
        )
    name_rows(axes, list(idle_of))
    axes.set_xlabel("seconds since the generation began")
    return most


def _sync_panel(run: RecordedRun) -> Panel:
    sync_s, num_bytes = run.series("sync/seconds"), middle_of(run.series("sync/bytes"))
    typical = middle_of(sync_s)
    title = "No sync was recorded" if typical is None else f"A sync takes {typical:.2f} s (median)"
    note = "Slowest engine of each sync." + (
        "" if num_bytes is None else f" {num_bytes / 1e6:,.1f} MB of weights per engine."
    )
    return Panel(title=title, note=note, svg=_half_plot(run, sync_s, "seconds", title), half=True)


def _half_plot(run: RecordedRun, values: Floats, label: str, title: str) -> str:
    """One metric over the steps."""
    figure = new_figure(2.5, width=4.6)
    axes = figure.add_subplot()
    axes.plot(run.steps, values, color=BLUE, linewidth=1.4, marker="o", markersize=3 if len(run.steps) <= 60 else 0)
    if np.isfinite(values).any():
        axes.set_ylim(0, 1.15 * np.nanmax(values) or 1.0)
    axes.set_ylabel(label)
    _step_axis(axes, run)
    return svg(figure, title)


def _text_rows(run: RecordedRun) -> list[tuple[str, str]]:
    ends = {record["step"]: record for record in (*run.texts[:1], *run.texts[-1:])}
    return [
        (f"step {step}, {text['which']}, reward {text['reward']:g}", f"{text['prompt']}\n{text['completion']}".strip())
        for step, record in ends.items()
        for text in record["texts"]
    ]


def _event_time(event: Mapping[str, Any]) -> str:
    return f"{event['time_s']:.1f} s"


def _event_text(event: Mapping[str, Any]) -> str:
    rest = ", ".join(f"{key} {value}" for key, value in event.items() if key not in ("what", "time_s"))
    return f"{event['what'].replace('_', ' ')}: {rest}"
