"""The page of `paceline tune`: which draft length pays at which batch, and what is accepted."""

from __future__ import annotations

from html import escape
from pathlib import Path

import numpy as np

from paceline.measure import Result
from paceline.report.page import BLUE, ORANGE, Card, Panel, drawing, flat, new_figure, svg, table, write_page
from paceline.selector.tuning import Tuning


def write_tuning_page(path: Path, result: Result, tuning: Tuning, command: str) -> None:
    batches = tuning.batches
    cards = [
        Card(label=f"{batch} requests", value=f"{tuning.gain(batch):.2f}x", note=f"with drafts of {tuning.best(batch)}")
        for batch in (batches[0], batches[len(batches) // 2], batches[-1])
    ]
    with drawing():
        panels = [_rates(tuning), _acceptance(tuning)]
    settings = table("Settings", flat(result.environment["config"]))
    write_page(
        path,
        name="paceline tune",
        subtitle=[str(tuning.costs.measured_on)],
        cards=cards,
        panels=panels,
        tables=f"<h2>In vllm serve</h2><pre>{escape(command)}</pre>{settings}",
    )


def _rates(tuning: Tuning) -> Panel:
    from matplotlib import colormaps

    title = "What each draft length is worth depends on the batch"
    figure = new_figure(3.2)
    axes = figure.add_subplot()
    for batch, shade in zip(
        tuning.batches, colormaps["viridis"](np.linspace(0.15, 0.85, len(tuning.batches))), strict=True
    ):
        plain = tuning.rate(batch, 0)
        axes.plot(
            tuning.lengths,
            [tuning.rate(batch, k) / plain for k in tuning.lengths],
            "o-",
            color=shade,
            markersize=3,
            label=f"{batch} requests, plain {plain:.0f} tokens/s",
        )
    axes.axhline(1, color=ORANGE, linewidth=1)
    axes.set_xlabel("draft length k")
    axes.set_ylabel("tokens/s over k = 0")
    axes.legend(fontsize=7, ncols=2)
    note = "Steps that decode only, on your prompts. On some GPUs a drafter's first pass runs at k = 0 too."
    return Panel(title=title, note=note, svg=svg(figure, title))


def _acceptance(tuning: Tuning) -> Panel:
    accepted = tuning.costs.acceptance
    title = "How much of a draft is accepted"
    figure = new_figure(2.4)
    axes = figure.add_subplot()
    axes.bar(range(1, len(accepted) + 1), accepted, color=BLUE)
    axes.set_xlabel("draft position")
    axes.set_ylabel("share accepted")
    axes.set_ylim(0, 1)
    note = f"Among requests whose drafts were accepted up to there; {tuning.costs.num_trials:,} drafts verified."
    return Panel(title=title, note=note, svg=svg(figure, title))
