"""Pictures of the mismatch between engines and learner, of FP8 KV scales, and of what the guard did.

Everything is read from what the run recorded: k3, its floor and the guard's rung from the step metrics, the histogram
of log-ratios and the engines one by one from the `mismatch` records, scales and saturation from metrics
`kv/scale_k/<layer>` and the like.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.learner.correction import HISTOGRAM_EDGES
from paceline.learner.guard import Rung
from paceline.report.page import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    RED,
    SKY,
    SOFT,
    Panel,
    name_rows,
    new_figure,
    step_axis,
    svg,
)
from paceline.report.recorded import Floats, RecordedRun
from paceline.report.summary import middle_of, percent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes

_RUNGS = {
    Rung.OBSERVE: GREY,
    Rung.CORRECT: SKY,
    Rung.MASK: BLUE,
    Rung.RAISE_PRECISION: ORANGE,
    Rung.SKIP: PINK,
    Rung.STOP: RED,
}
_LIMITS = {"correct": SKY, "mask": BLUE, "raise_precision": ORANGE, "skip": PINK}
_LEAST_SHOWN = 1e-5
_MOST_ENGINES = 16
"""Drawn one by one; of more, lines would be a cloud."""
_FEW = 5
_MIDDLE = 1e-5
"""Log-ratios below it are rounding, drawn as one bin."""


def mismatch_panels(run: RecordedRun) -> list[Panel]:
    panels = [_steps_panel(run)]
    if run.mismatches:
        panels.append(_histogram_panel(run.mismatches))
    return panels


def scale_panels(run: RecordedRun) -> list[Panel]:
    """Nothing for a run whose KV cache is not in FP8."""
    panels = []
    for what, title in (("scale", "KV scales"), ("saturation", "Saturated keys and values")):
        if found := _by_layer(run, what):
            panels.append(_layers_panel(run, what, title, found))
    return panels


# Mismatch and decisions over the steps.


def _steps_panel(run: RecordedRun) -> Panel:
    k3, floor, rung = (run.series(key) for key in ("mismatch/k3", "mismatch/floor_k3", "guard/rung"))
    guarded = bool(np.isfinite(rung).any())
    reached = sorted({Rung(int(value)) for value in rung[np.isfinite(rung)]})
    rows = [row for row in Rung if row <= max(reached)] if guarded else []
    figure = new_figure(2.6 + (0.6 + 0.17 * len(rows) if guarded else 0))
    if guarded:
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[2.4, 0.35 + 0.19 * len(rows)])
    else:
        top, bottom = figure.add_subplot(), None
    _draw_k3(top, run, k3, floor)
    first, last = run.steps[0], run.steps[-1]
    if bottom is not None:
        _draw_rungs(bottom, run.steps, rung, rows)
        top.tick_params(axis="x", length=0)
    step_axis(bottom or top, first, last)
    figure.legend(loc="outside upper left", ncols=5, handlelength=1.6)
    typical, least = middle_of(k3), middle_of(floor)
    title = "The mismatch was not recorded" if typical is None else f"Mismatch k3 is {typical:.1e} (median)"
    if typical is not None and least:
        title += f", {typical / least:,.0f} times the learner's own noise"
    note = "KL estimate from the same tokens' log-probabilities in engine and learner, nats per token."
    if guarded:
        note += (
            f" Below: the guard's rung at each step, {_acted(run)}; dotted lines are the limits of the rungs in their "
            "colours."
        )
    return Panel(title=title, note=note, svg=svg(figure, title))


def _acted(run: RecordedRun) -> str:
    mode = run.config.get("guard", {}).get("mode", "observe")
    return "as it was done" if mode == "act" else "which it only observed (guard.mode is observe)"


def _draw_k3(axes: Axes, run: RecordedRun, k3: Floats, floor: Floats) -> None:
    names = sorted(
        {name for record in run.mismatches for name in record["engines"]}, key=lambda name: (len(name), name)
    )
    if 1 < len(names) <= _MOST_ENGINES:
        steps = [record["step"] for record in run.mismatches]
        for number, name in enumerate(names):
            values = np.array([record["engines"].get(name, np.nan) for record in run.mismatches], dtype=np.float64)
            label = "each engine" if number == 0 else None
            axes.plot(steps, _positive(values), color=GREEN, linewidth=1.0, label=label, zorder=3)
    size = 3 if len(run.steps) <= 60 else 0
    axes.plot(run.steps, _positive(k3), color=BLUE, linewidth=1.6, marker="o", markersize=size, label="all engines")
    if np.isfinite(_positive(floor)).any():
        label = "noise floor: learner against itself"
        axes.plot(run.steps, _positive(floor), color=GREY, linewidth=1.2, linestyle="--", label=label)
    shown = np.concatenate([_positive(k3), _positive(floor)])
    shown = shown[np.isfinite(shown)]
    if not len(shown):
        return
    axes.set_yscale("log")
    high = float(shown.max())
    guard = run.config.get("guard", {})
    for name, colour in _LIMITS.items():
        if name in guard and guard[name] <= 30 * high:  # one far above would flatten the curve
            axes.axhline(guard[name], color=colour, linewidth=1.2, linestyle=":")
            high = max(high, guard[name])
    # A learner in FP32 agrees with itself to 1e-13 and less; the mismatch is what must be seen.
    low = max(shown.min(), _LEAST_SHOWN * high)
    axes.set_ylim(10 ** np.floor(np.log10(low)), 10 ** np.ceil(np.log10(high) + 0.1))
    axes.set_ylabel("k3")


def _draw_rungs(axes: Axes, steps: Sequence[int], rung: Floats, rows: Sequence[Rung]) -> None:
    for row in rows:
        at = [(step - 0.5, 1.0) for step, value in zip(steps, rung, strict=True) if value == row]
        axes.broken_barh(
            at, (row, 0.88), facecolor=_RUNGS[row], alpha=0.45 if row == Rung.OBSERVE else 0.95, linewidth=0
        )
    name_rows(axes, [row.words for row in rows])


def _positive(values: Floats) -> Floats:
    """A log scale has no zero."""
    return np.where(values > 0, values, np.nan)


# Ratios.


def _histogram_panel(mismatches: Sequence[Mapping[str, Any]]) -> Panel:
    """The first and the last few steps, the learner over the engine. Left of the middle the learner finds the token
    less likely."""
    size = max(1, min(_FEW, len(mismatches) // 2))
    parts = [mismatches[:size], mismatches[size:][-size:]]
    figure = new_figure(2.5, width=4.6)
    axes = figure.add_subplot()
    edges = np.clip(HISTOGRAM_EDGES, -10 * np.sqrt(10), 10 * np.sqrt(10))
    most_far = 0.0
    for part, colour in zip(parts, (BLUE, ORANGE), strict=True):
        if not part:
            continue
        counts = np.sum([record["counts"] for record in part], axis=0)
        share = counts / max(1, counts.sum())
        floor = 0.5 / max(1, counts.sum())
        far = float(share[(edges[:-1] >= np.log(2) * 0.99) | (edges[1:] <= -np.log(2) * 0.99)].sum())
        most_far = far  # of the last part
        label = f"step {part[0]['step']}" if len(part) == 1 else f"steps {part[0]['step']} to {part[-1]['step']}"
        axes.stairs(
            100 * np.maximum(share, floor), edges, baseline=100 * floor, color=colour, linewidth=1.4, label=label
        )
    axes.set_xscale("symlog", linthresh=_MIDDLE, linscale=0.4)
    axes.set_xticks([-1, -1e-2, -1e-4, 0, 1e-4, 1e-2, 1], ["-1", "-0.01", "-1e-4", "0", "1e-4", "0.01", "1"])
    axes.minorticks_off()
    axes.set_yscale("log")
    axes.axvline(0, color=SOFT, linewidth=0.7)
    axes.set_xlabel("log-ratio, learner over engine")
    axes.set_ylabel("share of tokens, %")
    figure.legend(loc="outside upper left", ncols=2)
    title = f"{percent(most_far)} of tokens are off by more than a factor of about 2"
    note = "Raw ratios, before any truncation; four bins a decade on either side, both scales logarithmic."
    return Panel(title=title, note=note, svg=svg(figure, title), half=True)


# Scales.


_TENSORS = (("k", "keys", BLUE), ("v", "values", ORANGE), ("q", "queries", GREEN), ("", "keys and values", BLUE))


def _by_layer(run: RecordedRun, what: str) -> dict[str, list[tuple[str, Floats]]]:
    """Series over the steps by tensor (q, k, v, or "" for keys and values together), in the order of the layers."""
    pattern = re.compile(rf"kv/{what}_?([qkv]?)/(.+)")
    keys = sorted((key for key in run.metrics if pattern.fullmatch(key)), key=_natural)
    found: dict[str, list[tuple[str, Floats]]] = {}
    for key in keys:
        match = pattern.fullmatch(key)
        assert match is not None
        found.setdefault(match[1], []).append((match[2], run.series(key)))
    return found


def _natural(key: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", key)]


def _layers_panel(run: RecordedRun, what: str, title: str, found: Mapping[str, Sequence[tuple[str, Floats]]]) -> Panel:
    """Median over layers with the range, for each of queries, keys and values."""
    figure = new_figure(2.5, width=4.6)
    axes = figure.add_subplot()
    highest, where = -np.inf, ""
    for name, label, colour in _TENSORS:
        if name not in found:
            continue
        values = np.stack([series for _, series in found[name]])
        if not np.isfinite(values).any():
            continue
        layer = int(np.nanargmax(np.nan_to_num(values, nan=-np.inf).max(1)))
        if np.nanmax(values) > highest:
            highest, where = float(np.nanmax(values)), f"{name} of layer {found[name][layer][0]}".removeprefix(" of ")
        for _, series in found[name]:
            axes.plot(run.steps, series, color=colour, linewidth=0.8, alpha=0.5)
        axes.plot(run.steps, np.nanmedian(values, axis=0), color=colour, linewidth=1.8, label=f"{label}, median layer")
    axes.set_ylim(0, 1.1 * highest if highest > 0 else 1.0)
    axes.set_ylabel("scale" if what == "scale" else "share")
    step_axis(axes, run.steps[0], run.steps[-1])
    figure.legend(loc="outside upper left", ncols=3)
    shown = f"{highest:.3g}" if what == "scale" else percent(highest)
    note = (
        "A thin line for each layer; the scale times 448 is the largest value that E4M3 holds."
        if what == "scale"
        else ""
    )
    return Panel(title=f"{title}: at most {shown} ({where})", note=note, svg=svg(figure, title), half=True)
