"""Write the page of the bench `rollout`: makespans, draft lengths over time, and their gain and acceptance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from paceline.measure import Result
from paceline.report.plots import (
    BLUE,
    GREY,
    ORANGE,
    RED,
    Panel,
    bar_rows,
    drawing,
    new_figure,
    new_plot,
    panel,
    shades,
)
from paceline.report.render import write_page


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
    subtitle = (model, f"{len(lengths)} requests, longest {lengths[-1]}")
    write_page(path, "figures.html", name="Rollout with speculation", subtitle=subtitle, result=result, panels=panels)


def _makespan_panel(makespan_s: Mapping[str, Sequence[float]], speedup: float) -> Panel:
    arms = sorted(makespan_s, key=lambda arm: median(makespan_s[arm]))
    figure, axes = new_plot(0.6 + 0.3 * len(arms))
    colors = {"selector": BLUE, "plain": ORANGE}
    for row, arm in enumerate(arms):
        axes.barh(row, median(makespan_s[arm]), height=0.6, color=colors.get(arm, GREY))
        axes.plot(makespan_s[arm], [row] * len(makespan_s[arm]), "o", color=RED, markersize=3)
    bar_rows(axes, arms)
    axes.set_xlabel("makespan, s (bar: median; dots: runs)")
    title = f"The selector finishes the batch {speedup:.2f} times sooner than plain vLLM"
    note = "The same requests for every arm, each run to the same number of tokens; arms took turns within the batch."
    return panel(figure, title, note)


def _choice_panel(steps: Sequence[Mapping[str, Any]]) -> Panel:
    figure = new_figure(3.4)
    top, bottom = figure.subplots(2, 1, sharex=True)
    at_s = np.cumsum([step["seconds"] for step in steps])
    top.step(at_s, [step["num_requests"] for step in steps], color=ORANGE, where="post")
    top.set(ylabel="active requests", yscale="log")
    ticks = [2**power for power in range(max(step["num_requests"] for step in steps).bit_length())]
    top.set_yticks(ticks, [str(tick) for tick in ticks], minor=False)
    top.set_yticks([], minor=True)
    bottom.step(at_s, [step["drafted"] for step in steps], color=BLUE, where="post", linewidth=1)
    bottom.set(xlabel="seconds since the start of the batch", ylabel="chosen k")
    note = "The selector in the last round; single steps aside are probes."
    return panel(figure, "The draft length grows as the batch shrinks", note)


def _rate_panel(rates: Mapping[str, Mapping[str, float]]) -> Panel:
    figure, axes = new_plot(3.2)
    lengths = sorted({k for by_k in rates.values() for k in by_k if k != "plain"}, key=int)
    for (batch, by_k), shade in zip(rates.items(), shades(len(rates)), strict=True):
        if "plain" in by_k:
            measured = [k for k in lengths if k in by_k]
            gains = [by_k[k] / by_k["plain"] for k in measured]
            label = f"{batch} requests, plain {by_k['plain']:.0f} tokens/s"
            axes.plot([int(k) for k in measured], gains, "o-", color=shade, markersize=3, label=label)
    axes.axhline(1, color=ORANGE, linewidth=1)
    axes.set(xlabel="draft length k", ylabel="tokens/s over plain")
    note = "Decode steps of fixed draft lengths; 1 is plain vLLM at the same batch size."
    return panel(figure, "The gain of each draft length depends on the batch", note, columns=3)


def _acceptance_panel(accepted: Mapping[str, Sequence[float]]) -> Panel:
    figure, axes = new_plot(2.6)
    for (arm, shares), color in zip(accepted.items(), (BLUE, RED), strict=True):
        axes.plot(range(1, len(shares) + 1), shares, "o-", color=color, markersize=4, label=arm)
    axes.set(xlabel="position in the draft", ylabel="share accepted", ylim=(0, 1))
    return panel(figure, "Acceptance by draft position", "Share of drafts accepted up to the position before.")
