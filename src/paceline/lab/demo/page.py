"""The demo's page: the two timelines on one axis, the speed-up, the certificate, the learning curve."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from paceline.certify.lossless import FALSE_POSITIVE_RATE, TwoSample
from paceline.lab.demo.batch import DemoTimeline
from paceline.measure import Result
from paceline.report.page import BLUE, GREY, ORANGE, Card, Panel, drawing, flat, new_figure, svg, table, write_page
from paceline.report.recorded import read_run
from paceline.report.run import learning_panel
from paceline.report.summary import summary

_COLOURS = (GREY, BLUE)


def write_demo_page(
    path: Path, result: Result, timelines: Sequence[DemoTimeline], test: TwoSample, run_directory: Path | None
) -> None:
    """`run_directory` is that of the RL steps, None if there were none."""
    figures = result.figures
    cards = [
        Card(label="speed-up", value=f"{figures['speedup']:.2f}x", note="the same batch, the same tokens of work"),
        Card(
            label="certificate",
            value="no difference" if figures["certified"] else "DIFFERENT",
            note=f"two-sample test: p = {test.p_value:.3f}, false alarm {FALSE_POSITIVE_RATE:g}; see paceline certify",
        ),
        Card(label="time", value=f"{figures['seconds']:.0f} s", note="all of this page"),
    ]
    with drawing():
        panels = [_timelines(timelines, figures["speedup"])]
        if run_directory is not None:
            gain = Card(
                label="held-out accuracy",
                value=f"{100 * figures['accuracy_gain']:+.1f} points",
                note=f"a few RL steps; uncertain by {100 * result.spread['accuracy_gain']:.0f}",
            )
            cards.insert(2, gain)
            panels.append(learning_panel(read_run(run_directory), summary(run_directory)))
    write_page(
        path,
        name="paceline demo",
        subtitle=[str(result.environment["cpu"]), f"{result.environment['cores']} cores"],
        cards=cards,
        panels=panels,
        tables=table("Settings", flat(result.environment["config"])),
    )


def _timelines(timelines: Sequence[DemoTimeline], speedup: float) -> Panel:
    plain, ours = timelines
    title = f"The same long-tailed batch: {plain.seconds:.1f} s with plain vLLM, {ours.seconds:.1f} s with Paceline"
    figure = new_figure(4.6)
    rows = figure.subplots(3, 1, sharex=True, height_ratios=(2, 1.4, 1))
    for timeline, colour in zip(timelines, _COLOURS, strict=True):
        at_s = np.array([0.0, *timeline.at_s])
        running = np.array([timeline.num_requests, *timeline.running])
        rows[0].step(at_s, running, where="pre", color=colour, linewidth=1.8, label=timeline.name)
        rows[0].fill_between(at_s, running, step="pre", color=colour, alpha=0.15)
        rows[0].axvline(timeline.seconds, color=colour, linewidth=0.8, linestyle=":")
        rows[1].plot(timeline.at_s, timeline.rates(), color=colour, linewidth=1.4)
    rows[2].step(ours.at_s, ours.draft_length, where="pre", color=ORANGE, linewidth=1.2)
    rows[0].yaxis.get_major_locator().set_params(integer=True)
    rows[0].set_ylabel("rollouts running")
    rows[1].set_ylabel("tokens/s")
    rows[2].set_ylabel("draft length")
    rows[2].set_xlabel("seconds")
    rows[0].legend(loc="upper right", bbox_to_anchor=(0.94, 1.0))
    note = (
        f"{plain.num_requests} rollouts, each engine on all cores, one after the other. The last "
        f"rollouts run alone: there drafts are longest and gain most. {speedup:.2f} times as fast in all."
    )
    return Panel(title=title, note=note, svg=svg(figure, title))
