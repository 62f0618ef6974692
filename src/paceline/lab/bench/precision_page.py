"""The figures of `paceline bench precision` as one HTML page: speed, KV capacity and mismatch of FP8."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from paceline.measure import Result
from paceline.report.page import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    Card,
    Panel,
    drawing,
    flat,
    new_figure,
    svg,
    table,
    write_page,
)

_COLOURS = {"bf16": GREY, "weights": BLUE, "kv": ORANGE, "both": GREEN}
_NAMES = {"bf16": "BF16", "weights": "FP8 weights", "kv": "FP8 KV cache", "both": "both"}


def write_precision_page(result: Result, path: Path) -> None:
    details = result.details
    with drawing():
        panels = [_speed_panel(details["over_bf16"]), _mismatch_panel(details["k3"])]
    rates = [
        (cell, ", ".join(f"{_NAMES[arm]} {rate:.0f}" for arm, rate in arms.items()))
        for cell, arms in details["tokens_per_s"].items()
    ]
    write_page(
        path,
        name="FP8 rollouts",
        subtitle=(str(result.environment["config"]["model"]), "against BF16, with speculation and without"),
        cards=[
            Card(label=name.replace("_", " "), value=f"{value:.3g}", note=_goal(result, name))
            for name, value in result.figures.items()
        ],
        panels=panels,
        tables=table("Tokens per second", rates, is_open=True) + table("Environment", flat(result.environment)),
    )


def _goal(result: Result, name: str) -> str:
    if name not in result.goals:
        return f"spread {result.spread[name]:.2g}"
    sign, number = result.goals[name]
    return f"goal {sign} {number:g}, spread {result.spread[name]:.2g}"


def _speed_panel(ratios: Mapping[str, Mapping[str, float]]) -> Panel:
    """Draw a line for each arm, a plot for each context and draft length."""
    title = "Tokens per second over BF16, by batch"
    plots: dict[tuple[str, str], list[tuple[int, Mapping[str, float]]]] = {}
    for cell, arms in ratios.items():
        context, _, batch, _, k = cell.split()
        plots.setdefault((context, k), []).append((int(batch), arms))
    figure = new_figure(2.2 * ((len(plots) + 2) // 3))
    for number, ((context, k), points) in enumerate(sorted(plots.items()), start=1):
        axes = figure.add_subplot((len(plots) + 2) // 3, 3, number)
        points.sort(key=lambda point: point[0])
        batches = [batch for batch, _ in points]
        for arm in [arm for arm in points[0][1] if arm != "bf16"]:
            axes.plot(
                batches, [arms[arm] for _, arms in points], "o-", color=_COLOURS[arm], markersize=3, label=_NAMES[arm]
            )
        axes.axhline(1, color=GREY, linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_xticks(batches, [str(batch) for batch in batches])
        axes.set_title(f"{context} context, " + ("plain" if k == "0" else f"k = {k}"), fontsize=8)
        if number == 1:
            axes.legend(fontsize=7)
    note = (
        "Decode steps of engines that took turns; with speculation, step times and the accepted length pooled over "
        "batches."
    )
    return Panel(title=title, note=note, svg=svg(figure, title))


def _mismatch_panel(k3: Mapping[str, Mapping[str, float]]) -> Panel:
    title = "How far each precision is from the learner, without speculation and with it"
    figure = new_figure(2.4)
    axes = figure.add_subplot()
    for place, (arm, by) in enumerate(k3.items()):
        axes.bar(place - 0.2, by["off"], width=0.35, color=_COLOURS[arm])
        axes.bar(place + 0.2, by["on"], width=0.35, color=_COLOURS[arm], alpha=0.5)
    axes.set_yscale("log")
    axes.set_xticks(range(len(k3)), [_NAMES[arm] for arm in k3])
    axes.set_ylabel("k3 to the learner")
    note = (
        "Left bars plain, right bars with speculation; a policy whose every layer was trained, scales calibrated as in "
        "a run."
    )
    return Panel(title=title, note=note, svg=svg(figure, title))
