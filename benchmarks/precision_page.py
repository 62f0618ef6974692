"""Write the page of the bench `precision`: speed, KV capacity and mismatch of FP8."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from paceline.measure import Result
from paceline.report.plots import BLUE, GREEN, GREY, ORANGE, Panel, count_axis, drawing, new_figure, new_plot, panel
from paceline.report.render import write_page

_COLORS = {"bf16": GREY, "weights": BLUE, "kv": ORANGE, "both": GREEN}
_NAMES = {"bf16": "BF16", "weights": "FP8 weights", "kv": "FP8 KV cache", "both": "both"}


def write_precision_page(result: Result, path: Path) -> None:
    with drawing():
        panels = [_speed_panel(result.details["over_bf16"]), _mismatch_panel(result.details["k3"])]
    subtitle = (str(result.environment["config"]["model"]), "against BF16, with speculation and without")
    write_page(path, "figures.html", name="FP8 rollouts", subtitle=subtitle, result=result, panels=panels)


def _speed_panel(ratios: Mapping[str, Mapping[str, float]]) -> Panel:
    """Draw a line for each arm, a plot for each context and draft length."""
    plots: dict[tuple[str, str], list[tuple[int, Mapping[str, float]]]] = {}
    for cell, arms in ratios.items():
        context, _, batch, _, k = cell.split()
        plots.setdefault((context, k), []).append((int(batch), arms))
    rows = (len(plots) + 2) // 3
    figure = new_figure(2.2 * rows)
    for number, ((context, k), points) in enumerate(sorted(plots.items()), start=1):
        axes = figure.add_subplot(rows, 3, number)
        points.sort(key=lambda point: point[0])
        batches = [batch for batch, _ in points]
        for arm in [arm for arm in points[0][1] if arm != "bf16"]:
            gains = [arms[arm] for _, arms in points]
            label = _NAMES[arm] if number == 1 else None
            axes.plot(batches, gains, "o-", color=_COLORS[arm], markersize=3, label=label)
        axes.axhline(1, color=GREY, linewidth=1)
        count_axis(axes, batches)
        axes.set_title(f"{context} context, " + ("plain" if k == "0" else f"k = {k}"), fontsize=8)
    note = "Decode steps of engines that took turns; with speculation, step times and accepted length over all batches."
    return panel(figure, "Tokens per second over BF16, by batch", note)


def _mismatch_panel(k3: Mapping[str, Mapping[str, float]]) -> Panel:
    figure, axes = new_plot(2.4)
    for place, (arm, by) in enumerate(k3.items()):
        axes.bar(place - 0.2, by["off"], width=0.35, color=_COLORS[arm])
        axes.bar(place + 0.2, by["on"], width=0.35, color=_COLORS[arm], alpha=0.5)
    axes.set_xticks(range(len(k3)), [_NAMES[arm] for arm in k3])
    axes.set(yscale="log", ylabel="k3 to the learner")
    note = "Left bars plain, right bars with speculation; every layer of the policy was trained, scales calibrated."
    return panel(figure, "Mismatch of each precision with the learner", note)
