"""metrics.jsonl -> one HTML page that says how a run went: no script, nothing loaded from elsewhere, light and dark.

Plots are inline SVG by matplotlib. Ink, grid and secondary text are drawn in placeholder colours that become CSS variables, so one
picture serves both colour schemes; data colours are Okabe and Ito's, which people with any colour vision can tell apart.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.evidence.summary import (
    Floats,
    Interval,
    RecordedRun,
    RunSummary,
    StepRollouts,
    in_flight,
    middle_of,
    occupancy,
    percent,
    read_run,
    subtract,
    summary,
    truncated_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK, _SOFT, _LINE = "#101112", "#131415", "#161718"  # placeholders; see _svg
_BLUE, _ORANGE, _GREEN, _RED, _SKY, _PINK, _GREY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7", "#8a9099"
_STAGES = {
    "generation": _BLUE,
    "train": _ORANGE,
    "logprob": _SKY,
    "sync": _RED,
    "prepare": _GREEN,
    "data": _PINK,
    "eval": _GREY,
}
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.edgecolor": _LINE,
    "axes.labelcolor": _SOFT,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "figure.facecolor": "none",
    "grid.color": _LINE,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.labelcolor": _INK,
    "text.color": _INK,
    "text.parse_math": False,  # an engine's name may hold a dollar sign
    "xtick.color": _LINE,
    "xtick.labelcolor": _SOFT,
    "ytick.color": _LINE,
    "ytick.labelcolor": _SOFT,
    "svg.fonttype": "none",  # text stays text: small, searchable, in the reader's font
    "svg.hashsalt": "paceline",  # the same run gives the same page
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One picture, under a title that says what is to be seen in it."""

    title: str
    note: str
    svg: str
    half: bool = False
    """Shares a row with the next half panel."""


def write_report(run_dir: Path, *, step: int | None = None) -> Path:
    """Write run_dir/report.html. The engine timeline shows `step`, by default the one of median generation time."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise ValueError("report: matplotlib is not installed; pip install 'paceline[report]'") from None
    run = read_run(run_dir)
    figures = summary(run)
    chosen = _choose_step(run, step)
    with mpl.rc_context(_STYLE):
        panels = [_reward_panel(run, figures), _stages_panel(run, figures)]
        if chosen is not None:
            remark = " Shown is the step of median generation time." if step is None else ""
            panels += [_lengths_panel(run), _timeline_panel(run, chosen, remark)]
        panels += [_mismatch_panel(run), _sync_panel(run)]
    path = run_dir / "report.html"
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(_page(run, figures, panels), encoding="utf-8")
    temporary.replace(path)  # in one move: a browser that reloads never sees half a page
    return path


def _choose_step(run: RecordedRun, step: int | None) -> StepRollouts | None:
    if step is None:
        by_duration = sorted(run.rollouts, key=lambda batch: batch.window[1] - batch.window[0])
        return by_duration[len(by_duration) // 2] if by_duration else None
    found = {batch.step: batch for batch in run.rollouts}
    if step not in found:
        raise ValueError(f"step: got {step}; must be one of the recorded steps, {min(found, default=0)} to {max(found, default=0)}")
    return found[step]


# The pictures.


def _figure(height: float, width: float = 9.4) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _step_axis(axes: Axes, run: RecordedRun) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    first = 0 if run.evals and run.evals[0][0] == 0 else run.steps[0]
    axes.set_xlim(first - 0.5, run.steps[-1] + 0.5)


def _reward_panel(run: RecordedRun, figures: RunSummary) -> Panel:
    figure = _figure(3.0)
    axes = figure.add_subplot()
    steps, reward = np.array(run.steps), run.series("reward/mean")
    axes.plot(steps, reward, "o", color=_SKY, markersize=4, markeredgewidth=0, label="reward of a step")
    if len(steps) >= 5:
        axes.plot(steps, _smooth(reward), color=_BLUE, linewidth=1.8, label="mean of 5 steps")
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
            x, accuracy, errors, fmt="s-", color=_RED, linewidth=1.2, markersize=4.5, capsize=2, label="held-out accuracy"
        )
        if errors is not None:
            note += " Whiskers: 95 % interval over held-out prompts."
    _step_axis(axes, run)
    figure.legend(loc="outside upper left", ncols=3)
    title = f"Reward {_moved(figures.reward_start, figures.reward_end)}"
    if run.evals:
        title += f"; held-out accuracy {_moved(figures.accuracy_start, figures.accuracy_end)}"
    return Panel(title=title, note=note, svg=_svg(figure, title))


def _smooth(values: Floats, size: int = 5) -> Floats:
    """Centred mean that leaves out what is not a number and shrinks at the ends."""
    half = size // 2
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return np.array([np.nan if np.isnan(window).all() else np.nanmean(window) for window in windows])


def _interval_95(accuracy: Floats, num_prompts: int | None) -> Floats | None:
    """Half width of the normal interval of a share. None where it is not one, or where the number of prompts is not recorded."""
    if not num_prompts or not ((accuracy >= 0) & (accuracy <= 1)).all():
        return None
    return 1.96 * np.sqrt(accuracy * (1 - accuracy) / num_prompts)


def _moved(start: float | None, end: float | None) -> str:
    if start is None:
        return "was not recorded"
    if end is None:
        return f"is {start:.2f} so far"
    if abs(end - start) < 0.005:
        return f"stayed at {end:.2f}"
    return f"{'rose' if end > start else 'fell'} from {start:.2f} to {end:.2f}"


def _stages_panel(run: RecordedRun, figures: RunSummary) -> Panel:
    figure = _figure(3.0)
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
    if run.config.get("run", {}).get("lag"):
        note += " Engines work ahead in this run: generation is the time that the learner waited for a batch."
    return Panel(title=title, note=note, svg=_svg(figure, title))


def length_histogram(lengths: Sequence[Sequence[int]], num_bins: int = 40) -> tuple[list[int], list[list[float]]]:
    """Edges that all sets share, in whole tokens, and for each set the share of its rollouts in each bin."""
    longest = max(max(values) for values in lengths)
    width = -(-(longest + 1) // num_bins)
    edges = list(range(0, longest + 1 + width, width))
    return edges, [(np.histogram(values, edges)[0] / len(values)).tolist() for values in lengths]


def _lengths_panel(run: RecordedRun) -> Panel:
    figure = _figure(3.0)
    axes = figure.add_subplot()
    parts = [part for part in run.ends() if part]
    lengths = [np.concatenate([batch.length for batch in part]) for part in parts]
    edges, shares = length_histogram([values.tolist() for values in lengths])
    floor = 0.5 / max(len(values) for values in lengths)  # half a rollout: a bin of one is seen, an empty one is not
    for part, values, share, colour in zip(parts, lengths, shares, (_BLUE, _ORANGE), strict=False):
        label = f"{_steps_label(part)}: median {np.median(values):.0f}, p99 {np.quantile(values, 0.99):.0f}, longest {values.max()}"
        if (cut := truncated_of(run, part)) is not None:
            label += f", {percent(cut)} truncated"
        heights = 100 * np.maximum(share, floor)
        if part is parts[0]:  # only one is filled: two fills would mix into a third colour
            axes.stairs(heights, edges, baseline=100 * floor, fill=True, color=colour, alpha=0.3)
        axes.stairs(heights, edges, baseline=100 * floor, color=colour, linewidth=1.6, label=label)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_ylim(bottom=100 * floor)
    axes.set_xlim(0, edges[-1])
    axes.set_xlabel("response length, tokens")
    axes.set_ylabel("share of rollouts, %")
    figure.legend(loc="outside upper left", ncols=1)
    last = lengths[-1]
    title = f"The longest response has {last.max() / max(1.0, float(np.median(last))):.0f} times the tokens of the median one"
    note = f"Bins of {edges[1]} tokens; the scale of shares is logarithmic, so that a single long response is seen."
    return Panel(title=title, note=note, svg=_svg(figure, title))


def _steps_label(part: Sequence[StepRollouts]) -> str:
    return f"step {part[0].step}" if len(part) == 1 else f"steps {part[0].step} to {part[-1].step}"


def _timeline_panel(run: RecordedRun, chosen: StepRollouts, remark: str) -> Panel:
    """Rollouts in flight over one generation phase: all engines above, a row for each below, those that finish last on top."""
    window = chosen.window
    batches = [batch for batch in run.rollouts if batch.window[0] < window[1] and batch.window[1] > window[0]]
    found = occupancy(batches, within=window, evals=run.eval_intervals)
    last_busy = {engine: (intervals[-1][0] if intervals else window[1]) for engine, intervals in found.idle.items()}
    engines = sorted(found.idle, key=lambda engine: (last_busy[engine], engine))
    row_inches = max(0.11, min(0.55, 4 / len(engines)))
    figure = _figure(1.9 + row_inches * len(engines))
    top, rows = figure.subplots(2, 1, sharex=True, height_ratios=[1.1, row_inches * len(engines)])
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
    note = f"Half of the {len(chosen.length)} rollouts were done after {half_s:.1f} s, the last one after {last_s:.1f} s. "
    note += f"The full height of an engine's row is {most} rollouts in flight.{remark}"
    return Panel(title=title, note=note, svg=_svg(figure, title))


def _draw_fleet(axes: Axes, batches: Sequence[StepRollouts], window: Interval, tail: Sequence[Interval]) -> None:
    edges, counts = in_flight(batches, window)
    axes.stairs(counts, edges - window[0], fill=True, color=_BLUE, alpha=0.85, label="rollouts in flight")
    for number, (start, end) in enumerate(tail):
        label = "tail: some engine is idle" if number == 0 else None
        axes.axvspan(start - window[0], end - window[0], color=_ORANGE, alpha=0.28, linewidth=0, zorder=0, label=label)
    axes.set_ylabel("all engines")
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, window[1] - window[0])


def _draw_engines(axes: Axes, batches: Sequence[StepRollouts], window: Interval, idle_of: Mapping[str, Sequence[Interval]]) -> int:
    """A row for each engine, in this order from the bottom; returns how many rollouts fill a row's height."""
    curves = {engine: in_flight(batches, window, engine) for engine in idle_of}
    most = max(1, *(int(counts.max()) for _, counts in curves.values()))
    for row, (engine, idle) in enumerate(idle_of.items()):
        edges, counts = curves[engine]
        # A pale bar behind the curve: one rollout of many is a hairline, and a busy engine must not look like an idle one.
        busy = [(start - window[0], end - start) for start, end in subtract([window], idle)]
        axes.broken_barh(
            busy, (row, 0.88), facecolor=_BLUE, alpha=0.16, linewidth=0, label="this engine is busy" if row == 0 else None
        )
        axes.stairs(row + 0.88 * counts / most, edges - window[0], baseline=row, fill=True, color=_BLUE, alpha=0.85)
        bars = [(start - window[0], end - start) for start, end in idle]
        axes.broken_barh(
            bars, (row, 0.88), facecolor=_ORANGE, alpha=0.55, linewidth=0, label="this engine is idle" if row == 0 else None
        )
    every = 1 if len(idle_of) <= 24 else -(-len(idle_of) // 16)
    names = list(idle_of)
    shown = list(range(len(names) - 1, -1, -every))  # from the top: the engine that finishes last has its name
    axes.set_yticks([row + 0.44 for row in shown], [_short(names[row]) for row in shown])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(0, len(names))
    axes.grid(visible=False)
    axes.set_xlabel("seconds since the generation began")
    return most


def _short(name: str, most: int = 18) -> str:
    return name if len(name) <= most else f"{name[: most - 8]}…{name[-7:]}"


def _mismatch_panel(run: RecordedRun) -> Panel:
    k3 = run.series("mismatch/k3")
    typical = middle_of(k3)
    title = "The mismatch was not recorded" if typical is None else f"Mismatch k3 is {typical:.1e} (median)"
    svg = _half_plot(run, k3, "k3, nats per token", title, log=True)
    return Panel(title=title, note="KL estimate from the same tokens' log-probabilities in engine and learner.", svg=svg, half=True)


def _sync_panel(run: RecordedRun) -> Panel:
    sync_s, num_bytes = run.series("sync/seconds"), middle_of(run.series("sync/bytes"))
    typical = middle_of(sync_s)
    title = "No sync was recorded" if typical is None else f"A sync takes {typical:.2f} s (median)"
    note = "Slowest engine of each sync." + ("" if num_bytes is None else f" {num_bytes / 1e6:,.1f} MB of weights per engine.")
    return Panel(title=title, note=note, svg=_half_plot(run, sync_s, "seconds", title, log=False), half=True)


def _half_plot(run: RecordedRun, values: Floats, label: str, title: str, *, log: bool) -> str:
    """One metric over the steps. A log scale has no zero: what is not positive is left out there, unless there is nothing else."""
    figure = _figure(2.5, width=4.6)
    axes = figure.add_subplot()
    log = log and bool((values > 0).any())
    shown = np.where(values > 0, values, np.nan) if log else values
    axes.plot(run.steps, shown, color=_BLUE, linewidth=1.4, marker="o", markersize=3 if len(run.steps) <= 60 else 0)
    if log:
        axes.set_yscale("log")
        low, high = np.nanmin(shown), np.nanmax(shown)
        axes.set_ylim(10 ** np.floor(np.log10(low)), 10 ** np.ceil(np.log10(high) + 1e-9))  # whole decades carry labels
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0e}")
    elif np.isfinite(shown).any():
        axes.set_ylim(0, 1.15 * np.nanmax(shown) or 1.0)
    axes.set_ylabel(label)
    _step_axis(axes, run)
    return _svg(figure, title)


def _svg(figure: Figure, title: str) -> str:
    """The figure as an element of an HTML page: no prolog, no metadata, no fixed size, colours by CSS variable."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'^<svg[^>]*?viewBox="([^"]*)"[^>]*>', rf'<svg viewBox="\1" role="img" aria-label="{escape(title)}">', text)
    for placeholder, variable in ((_INK, "--ink"), (_SOFT, "--soft"), (_LINE, "--line")):
        text = text.replace(placeholder, f"var({variable})")
    return text


# The page.


def _page(run: RecordedRun, figures: RunSummary, panels: Sequence[Panel]) -> str:
    cards = "".join(
        f"<div class=card><span>{escape(h.label)}</span><b>{escape(h.value)}</b><small>{escape(h.note)}</small></div>"
        for h in figures.headlines()
    )
    unfinished = figures.planned_steps is not None and figures.num_steps < figures.planned_steps
    state = (
        "<p class=notice>This run is still going or was stopped: the page shows what has been recorded.</p>" if unfinished else ""
    )
    model = str(run.config.get("policy", {}).get("model", ""))
    subtitle = " · ".join(escape(part) for part in (model, run.started) if part)
    tables = _table("Events", [(_event_time(e), _event_text(e)) for e in run.events])
    tables += _table("Config", _flat(run.config)) + _table("Environment", _flat(run.environment))
    return _TEMPLATE.format(
        name=escape(run.name),
        subtitle=subtitle,
        state=state,
        cards=cards,
        panels="".join(_section(panel) for panel in panels),
        tables=tables,
        css=_CSS,
    )


def _section(panel: Panel) -> str:
    kind = " class=half" if panel.half else ""
    return f"<section{kind}><h2>{escape(panel.title)}</h2><p>{escape(panel.note)}</p><div class=plot>{panel.svg}</div></section>"


def _event_time(event: Mapping[str, Any]) -> str:
    return f"{event['time_s']:.1f} s"


def _event_text(event: Mapping[str, Any]) -> str:
    rest = ", ".join(f"{key} {value}" for key, value in event.items() if key not in ("what", "time_s"))
    return f"{event['what'].replace('_', ' ')}: {rest}"


def _flat(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in tree.items():
        rows += _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(f"{prefix}{key}", str(value))]
    return rows


def _table(name: str, rows: Sequence[tuple[str, str]]) -> str:
    if not rows:
        return ""
    cells = "".join(f"<tr><th>{escape(key)}</th><td>{escape(value)}</td></tr>" for key, value in rows)
    return f"<details><summary>{name} ({len(rows)})</summary><table>{cells}</table></details>"


_CSS = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #59636e; --line: #d5dae0; --paper: #ffffff; --card: #f5f7f9; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8ebee; --soft: #a3adb8; --line: #39414a; --paper: #14171a; --card: #1d2226; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1040px; padding: 2.5rem 1.5rem 4rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; font-variant-numeric: tabular-nums; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.08rem; line-height: 1.35; margin: 0; }
p { margin: .15rem 0 .6rem; color: var(--soft); font-size: .875rem; }
header p { margin: .3rem 0 0; overflow-wrap: anywhere; }
.notice { border-left: 3px solid #e69f00; padding: .2rem .8rem; margin: 1rem 0 0; }
.cards { display: grid; grid-template-columns: repeat(4, 1fr); gap: .75rem; margin: 1.6rem 0 2.4rem; }
.card { background: var(--card); border-radius: 8px; padding: .8rem 1rem; }
.card span, .card small { display: block; color: var(--soft); font-size: .8rem; line-height: 1.35; }
.card b { display: block; font-size: 1.22rem; font-weight: 600; margin: .1rem 0; }
main { display: grid; grid-template-columns: 1fr 1fr; gap: 2.4rem 2rem; }
section { grid-column: 1 / -1; min-width: 0; }
section.half { grid-column: auto; }
.plot { overflow-x: auto; }
.plot svg { display: block; width: 100%; height: auto; min-width: 640px; }
.half .plot svg { min-width: 340px; }
.plot text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif !important; }
details { border-top: 1px solid var(--line); padding: .7rem 0; }
summary { cursor: pointer; font-weight: 600; }
.tables { margin-top: 2.8rem; }
table { border-collapse: collapse; font-size: .84rem; margin: .6rem 0; }
th, td { text-align: left; vertical-align: top; padding: .18rem 1.2rem .18rem 0; font-weight: 400; overflow-wrap: anywhere; }
th { color: var(--soft); white-space: nowrap; }
@media (max-width: 760px) { .cards { grid-template-columns: 1fr 1fr; } section.half { grid-column: 1 / -1; } }
"""

_TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{name}: Paceline report</title>
<style>{css}</style>
</head>
<body>
<header><h1>{name}</h1><p>{subtitle}</p>{state}</header>
<div class="cards">{cards}</div>
<main>{panels}</main>
<div class="tables">{tables}</div>
</body>
</html>
"""
