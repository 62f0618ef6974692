"""Write the demo's page: two timelines on one axis, the speedup, equal tokens, the learning curve."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from paceline.demo.batch import DemoTimeline
from paceline.measure import Result
from paceline.report.plots import BLUE, GRAY, ORANGE, Panel, drawing, new_figure, panel
from paceline.report.recorded import read_run
from paceline.report.render import write_page
from paceline.report.run import learning_panel
from paceline.report.summary import summary


def write_demo_page(path: Path, result: Result, timelines: Sequence[DemoTimeline], run_directory: Path | None) -> None:
    """Write the page; `run_directory` has the RL steps, if there were any."""
    with drawing():
        panels = [_timelines(timelines, result.figures["speedup"])]
        if run_directory is not None:
            panels.append(learning_panel(read_run(run_directory), summary(run_directory)))
    write_page(path, "demo.html", result=result, panels=panels)


def _timelines(timelines: Sequence[DemoTimeline], speedup: float) -> Panel:
    plain, ours = timelines
    figure = new_figure(4.6)
    rows = figure.subplots(3, 1, sharex=True, height_ratios=(2, 1.4, 1))
    for timeline, color in zip(timelines, (GRAY, BLUE), strict=True):
        at_s = np.array([0.0, *timeline.at_s])
        running = np.array([timeline.num_requests, *timeline.running])
        rows[0].step(at_s, running, where="pre", color=color, linewidth=1.8, label=timeline.name)
        rows[0].fill_between(at_s, running, step="pre", color=color, alpha=0.15)
        rows[0].axvline(timeline.seconds, color=color, linewidth=0.8, linestyle=":")
        rows[1].plot(timeline.at_s, timeline.rates(), color=color, linewidth=1.4)
    rows[2].step(ours.at_s, ours.draft_length, where="pre", color=ORANGE, linewidth=1.2)
    rows[0].yaxis.get_major_locator().set_params(integer=True)
    for axes, label in zip(rows, ("rollouts running", "tokens/s", "draft length"), strict=True):
        axes.set_ylabel(label)
    rows[2].set_xlabel("seconds")
    return panel(
        figure,
        f"The same long-tailed batch: {plain.seconds:.1f} s with plain vLLM, {ours.seconds:.1f} s with Paceline",
        f"{plain.num_requests} rollouts; each engine ran alone on all cores. The last rollouts run alone: there drafts "
        f"are longest and gain most. {speedup:.2f} times as fast overall.",
    )
