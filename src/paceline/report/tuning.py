"""Write the page of `paceline tune`: the draft length that pays at each batch size, and acceptance."""

from __future__ import annotations

from pathlib import Path

from paceline.measure import Result
from paceline.report.plots import BLUE, ORANGE, Panel, drawing, new_plot, panel, shades
from paceline.report.render import write_page
from paceline.selector.tuning import Tuning


def write_tuning_page(path: Path, result: Result, tuning: Tuning, command: str) -> None:
    with drawing():
        panels = [_rates(tuning), _acceptance(tuning)]
    write_page(path, "tune.html", tuning=tuning, config=result.environment["config"], command=command, panels=panels)


def _rates(tuning: Tuning) -> Panel:
    figure, axes = new_plot(3.2)
    for batch, shade in zip(tuning.batches, shades(len(tuning.batches)), strict=True):
        plain = tuning.rate(batch, 0)
        gains = [tuning.rate(batch, k) / plain for k in tuning.lengths]
        label = f"{batch} requests, plain {plain:.0f} tokens/s"
        axes.plot(tuning.lengths, gains, "o-", color=shade, markersize=3, label=label)
    axes.axhline(1, color=ORANGE, linewidth=1)
    axes.set(xlabel="draft length k", ylabel="tokens/s over k = 0", xticks=tuning.lengths)
    note = "Decode steps on your prompts. On some GPUs a drafter's first pass runs at k = 0 too."
    return panel(figure, "The gain of each draft length depends on the batch", note, columns=3)


def _acceptance(tuning: Tuning) -> Panel:
    accepted = tuning.costs.acceptance
    figure, axes = new_plot(2.4)
    positions = range(1, len(accepted) + 1)
    axes.bar(positions, accepted, color=BLUE)
    axes.set(xlabel="draft position", ylabel="share accepted", xticks=positions, ylim=(0, 1))
    note = f"Share of drafts accepted up to the position before; {tuning.costs.num_trials:,} drafts verified."
    return panel(figure, "Acceptance by draft position", note)
