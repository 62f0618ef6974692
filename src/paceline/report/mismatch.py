"""Plot the mismatch between engines and learner, FP8 KV scales and the guard's levels.

k3, its floor and the guard's level are step metrics. The histogram of log-ratios and the k3 of each engine come from
the `mismatch` records, scales and saturation from metrics such as `kv/scale_k/<layer>`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.learner.correction import HISTOGRAM_EDGES
from paceline.learner.guard import Level
from paceline.report.plots import (
    BLUE,
    GRAY,
    GREEN,
    ORANGE,
    PINK,
    RED,
    SKY,
    SOFT,
    Panel,
    name_rows,
    new_figure,
    new_plot,
    panel,
    step_axis,
)
from paceline.report.recorded import Floats, RecordedRun, ends
from paceline.report.summary import middle_of, percent, steps_words

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes

_LEVELS = {
    Level.OBSERVE: GRAY,
    Level.CORRECT: SKY,
    Level.MASK: BLUE,
    Level.RAISE_PRECISION: ORANGE,
    Level.SKIP: PINK,
    Level.STOP: RED,
}
_LEAST_SHOWN = 1e-5
_MOST_ENGINES = 16
"""Most engines drawn as lines of their own."""
_MIDDLE = 1e-5
"""Smaller log-ratios are rounding, drawn as one bin."""


def mismatch_panels(run: RecordedRun) -> list[Panel]:
    panels = [_steps_panel(run)]
    if run.mismatches:
        panels.append(_histogram_panel(run.mismatches))
    return panels


def scale_panels(run: RecordedRun) -> list[Panel]:
    """Return no panels for runs without an FP8 KV cache."""
    found = {what: _by_layer(run, what) for what in ("scale", "saturation")}
    return [_layers_panel(run, what, layers) for what, layers in found.items() if layers]


# Mismatch and decisions over the steps.


def _steps_panel(run: RecordedRun) -> Panel:
    k3, floor, level = (run.series(key) for key in ("mismatch/k3", "mismatch/floor_k3", "guard/level"))
    note = "KL estimate from the log-probabilities of the same tokens in engine and learner, nats per token."
    if np.isfinite(level).any():
        rows = [row for row in Level if row <= np.nanmax(level)]
        figure = new_figure(3.2 + 0.17 * len(rows))
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[2.4, 0.35 + 0.19 * len(rows)])
        _draw_levels(bottom, run.steps, level, rows)
        top.tick_params(axis="x", length=0)
        acts = run.config.get("guard", {}).get("mode", "observe") == "act"
        note += f" Below: the guard's level at each step{'' if acts else ', not enforced (guard.mode is observe)'}."
        note += " Dotted lines are the levels' limits, in their colors."
    else:
        figure, top = new_plot(2.6)
        bottom = top
    _draw_k3(top, run, k3, floor)
    step_axis(bottom, run.steps[0], run.steps[-1])
    typical, least = middle_of(k3), middle_of(floor)
    title = "The mismatch was not recorded" if typical is None else f"Mismatch k3 is {typical:.1e} (median)"
    if typical is not None and least:
        title += f", {typical / least:,.0f} times the learner's own noise"
    return panel(figure, title, note, columns=5)


def _draw_k3(axes: Axes, run: RecordedRun, k3: Floats, floor: Floats) -> None:
    names = {name for record in run.mismatches for name in record["engines"]}
    if 1 < len(names) <= _MOST_ENGINES:
        steps = [record["step"] for record in run.mismatches]
        for number, name in enumerate(sorted(names)):
            values = np.array([record["engines"].get(name, np.nan) for record in run.mismatches], dtype=np.float64)
            label = "each engine" if number == 0 else None
            axes.plot(steps, _positive(values), color=GREEN, linewidth=1.0, label=label, zorder=3)
    size = 3 if len(run.steps) <= 60 else 0
    axes.plot(run.steps, _positive(k3), color=BLUE, linewidth=1.6, marker="o", markersize=size, label="all engines")
    if np.isfinite(_positive(floor)).any():
        label = "noise floor: learner against itself"
        axes.plot(run.steps, _positive(floor), color=GRAY, linewidth=1.2, linestyle="--", label=label)
    shown = np.concatenate([_positive(k3), _positive(floor)])
    shown = shown[np.isfinite(shown)]
    if not len(shown):
        return
    high = float(shown.max())
    guard = run.config.get("guard", {})
    for row, color in _LEVELS.items():
        limit = guard.get(row.name.lower())
        if limit is not None and limit <= 30 * high:  # a limit far above would flatten the curve
            axes.axhline(limit, color=color, linewidth=1.2, linestyle=":")
            high = max(high, limit)
    # A learner in FP32 agrees with itself to 1e-13, far below the mismatch that must stay visible.
    low = max(shown.min(), _LEAST_SHOWN * high)
    limits = (10 ** np.floor(np.log10(low)), 10 ** np.ceil(np.log10(high) + 0.1))
    axes.set(yscale="log", ylabel="k3", ylim=limits)


def _draw_levels(axes: Axes, steps: Sequence[int], level: Floats, rows: Sequence[Level]) -> None:
    for row in rows:
        at = [(step - 0.5, 1.0) for step, value in zip(steps, level, strict=True) if value == row]
        alpha = 0.45 if row == Level.OBSERVE else 0.95
        axes.broken_barh(at, (row, 0.88), facecolor=_LEVELS[row], alpha=alpha, linewidth=0)
    name_rows(axes, [row.words for row in rows])


def _positive(values: Floats) -> Floats:
    """Replace values that a log scale cannot show by NaN."""
    return np.where(values > 0, values, np.nan)


# Ratios.


def _histogram_panel(mismatches: Sequence[Mapping[str, Any]]) -> Panel:
    """Plot learner over engine in the first and last steps; on the left the learner finds tokens less likely."""
    parts = [part for part in ends(mismatches) if part]
    figure, axes = new_plot(2.5, half=True)
    edges = np.clip(HISTOGRAM_EDGES, -10 * np.sqrt(10), 10 * np.sqrt(10))
    is_far = (edges[:-1] >= np.log(2) * 0.99) | (edges[1:] <= -np.log(2) * 0.99)
    share = np.zeros(len(is_far))
    for part, color in zip(parts, (BLUE, ORANGE), strict=False):
        counts = np.sum([record["counts"] for record in part], axis=0)
        share = counts / max(1, counts.sum())
        floor = 0.5 / max(1, counts.sum())
        label = steps_words(part[0]["step"], part[-1]["step"])
        heights = 100 * np.maximum(share, floor)
        axes.stairs(heights, edges, baseline=100 * floor, color=color, linewidth=1.4, label=label)
    axes.set_xscale("symlog", linthresh=_MIDDLE, linscale=0.4)
    axes.set_xticks([-1, -1e-2, -1e-4, 0, 1e-4, 1e-2, 1], ["-1", "-0.01", "-1e-4", "0", "1e-4", "0.01", "1"])
    axes.minorticks_off()
    axes.axvline(0, color=SOFT, linewidth=0.7)
    axes.set(yscale="log", xlabel="log-ratio, learner over engine", ylabel="share of tokens, %")
    title = f"{percent(float(share[is_far].sum()))} of tokens are off by more than a factor of about 2"
    note = "Raw ratios, before truncation; four bins a decade on either side, both scales logarithmic."
    return panel(figure, title, note)


# Scales.


_TENSORS = (("k", "keys", BLUE), ("v", "values", ORANGE), ("q", "queries", GREEN), ("", "keys and values", BLUE))


def _by_layer(run: RecordedRun, what: str) -> dict[str, list[tuple[str, Floats]]]:
    """Return series over the steps by tensor (q, k, v, or "" for keys and values together), in the order of layers."""
    found: dict[str, list[tuple[str, Floats]]] = {}
    for key in sorted(run.metrics, key=_natural):
        if match := re.fullmatch(rf"kv/{what}_?([qkv]?)/(.+)", key):
            found.setdefault(match[1], []).append((match[2], run.series(key)))
    return found


def _natural(key: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", key)]


def _layers_panel(run: RecordedRun, what: str, found: Mapping[str, Sequence[tuple[str, Floats]]]) -> Panel:
    """Plot every layer and the median layer, for each of queries, keys and values."""
    figure, axes = new_plot(2.5, half=True)
    highest, where = -np.inf, ""
    for name, label, color in _TENSORS:
        if name not in found:
            continue
        values = np.stack([series for _, series in found[name]])
        if not np.isfinite(values).any():
            continue
        if np.nanmax(values) > highest:
            layer = int(np.nanargmax(np.nan_to_num(values, nan=-np.inf).max(1)))
            highest, where = float(np.nanmax(values)), f"{name} of layer {found[name][layer][0]}".removeprefix(" of ")
        axes.plot(run.steps, values.T, color=color, linewidth=0.8, alpha=0.5)
        axes.plot(run.steps, np.nanmedian(values, axis=0), color=color, linewidth=1.8, label=f"{label}, median layer")
    is_scale = what == "scale"
    axes.set(ylabel="scale" if is_scale else "share", ylim=(0, 1.1 * highest if highest > 0 else 1.0))
    step_axis(axes, run.steps[0], run.steps[-1])
    title, shown = ("KV scales", f"{highest:.3g}") if is_scale else ("Saturated keys and values", percent(highest))
    note = "A thin line per layer; the scale times 448 is the largest value that E4M3 holds." if is_scale else ""
    return panel(figure, f"{title}: at most {shown} ({where})", note, columns=3)
