"""The figures of `paceline bench rollout` as one HTML page: who was how fast, which draft length when, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from paceline.measure import Result
from paceline.report.page import BLUE, GREY, ORANGE, RED, Card, Panel, drawing, flat, new_figure, svg, table, write_page


def write_rollout_page(result: Result, path: Path) -> None:
    details = result.details
    model, lengths = str(result.environment["config"]["model"]), details["lengths"]
    with drawing():
        panels = [
            _makespan_panel(details["makespan_s"], result.figures["makespan_speedup"]),
            _choice_panel(details["chosen"]),
            _rate_panel(details["rate_by_batch"]),
            _acceptance_panel(details["accepted_by_position"]),
        ]
    write_page(
        path,
        name="Rollout with speculation",
        subtitle=(model, f"{len(lengths)} requests, longest {lengths[-1]}"),
        cards=[
            Card(label=_words(name), value=f"{value:.2f}", note=_goal(result, name))
            for name, value in result.figures.items()
        ],
        panels=panels,
        tables=table("Environment", flat(result.environment)),
    )


def _words(name: str) -> str:
    return name.replace("_", " ")


def _goal(result: Result, name: str) -> str:
    spread = f"spread {result.spread[name]:.2f}"
    if name not in result.goals:
        return spread
    sign, number = result.goals[name]
    return f"goal {sign} {number}, {spread}"


def _makespan_panel(makespan_s: Mapping[str, Sequence[float]], speedup: float) -> Panel:
    title = f"The selector finishes the batch {speedup:.2f} times sooner than plain vLLM"
    arms = sorted(makespan_s, key=lambda arm: median(makespan_s[arm]))
    figure = new_figure(0.6 + 0.3 * len(arms))
    axes = figure.add_subplot()
    colours = {"selector": BLUE, "plain": ORANGE}
    for row, arm in enumerate(arms):
        axes.barh(row, median(makespan_s[arm]), height=0.6, color=colours.get(arm, GREY))
        axes.plot(makespan_s[arm], [row] * len(makespan_s[arm]), "o", color=RED, markersize=3)
    axes.set_yticks(range(len(arms)), arms)
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.set_xlabel("makespan, s (bar: median; dots: runs)")
    note = "The same requests for every arm, each run to the same number of tokens; arms took turns within the batch."
    return Panel(title=title, note=note, svg=svg(figure, title))


def _choice_panel(steps: Sequence[Mapping[str, Any]]) -> Panel:
    title = "The draft length grows as the batch shrinks"
    figure = new_figure(3.4)
    top, bottom = figure.subplots(2, 1, sharex=True)
    at_s = np.cumsum([step["seconds"] for step in steps])
    top.step(at_s, [step["num_requests"] for step in steps], color=ORANGE, where="post")
    top.set_ylabel("active requests")
    top.set_yscale("log")
    ticks = [2**power for power in range(max(step["num_requests"] for step in steps).bit_length())]
    top.set_yticks(ticks, [str(tick) for tick in ticks], minor=False)
    top.set_yticks([], minor=True)
    bottom.step(at_s, [step["drafted"] for step in steps], color=BLUE, where="post", linewidth=1)
    bottom.set_ylabel("chosen k")
    bottom.set_xlabel("seconds since the start of the batch")
    return Panel(
        title=title, note="The selector in the last round; single steps aside are probes.", svg=svg(figure, title)
    )


def _rate_panel(rates: Mapping[str, Mapping[str, float]]) -> Panel:
    title = "What each draft length is worth depends on the batch"
    figure = new_figure(3.2)
    axes = figure.add_subplot()
    lengths = sorted({k for by_k in rates.values() for k in by_k if k != "plain"}, key=int)
    from matplotlib import colormaps

    shades = colormaps["viridis"](np.linspace(0.15, 0.85, len(rates)))
    for (batch, by_k), shade in zip(rates.items(), shades, strict=True):
        if "plain" in by_k:
            axes.plot(
                [int(k) for k in lengths if k in by_k],
                [by_k[k] / by_k["plain"] for k in lengths if k in by_k],
                "o-",
                color=shade,
                markersize=3,
                label=f"{batch} requests, plain {by_k['plain']:.0f} tokens/s",
            )
    axes.axhline(1, color=ORANGE, linewidth=1)
    axes.set_xlabel("draft length k")
    axes.set_ylabel("tokens/s over plain")
    axes.legend(fontsize=7, ncols=2)
    note = "Steps that decode only, from the survey of fixed lengths; 1 is plain vLLM at the same batch size."
    return Panel(title=title, note=note, svg=svg(figure, title))


def _acceptance_panel(accepted: Mapping[str, Sequence[float]]) -> Panel:
    title = "How often a draft position is accepted"
    figure = new_figure(2.6)
    axes = figure.add_subplot()
    for (arm, shares), colour in zip(accepted.items(), (BLUE, RED), strict=True):
        axes.plot(range(1, len(shares) + 1), shares, "o-", color=colour, markersize=4, label=arm)
    axes.set_ylim(0, 1)
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("share accepted")
    axes.legend()
    note = "Of the drafts that had a token at the position, with every position before it accepted as well."
    return Panel(title=title, note=note, svg=svg(figure, title))
