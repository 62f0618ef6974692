"""A plan as one HTML page, and scaling from few GPUs to many as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

from paceline.context import Context
from paceline.plan.answer import LEVERS, Answer, levers, simulate_arm
from paceline.plan.question import Question
from paceline.plan.recipe import recommended
from paceline.plan.run_model import STAGES
from paceline.report.page import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    RED,
    Card,
    Panel,
    drawing,
    flat,
    new_figure,
    svg,
    table,
    write_page,
)

SWEEP = tuple(2**power for power in range(3, 13))
"""Numbers of GPUs that a sweep tries."""
_SWEPT = ("plain", "speculation", "asynchrony", "together")
_COLOURS = {"plain": GREY, "speculation": BLUE, "asynchrony": GREEN, "together": RED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    gpus: Sequence[int]
    step_s: Mapping[str, Sequence[float]]

    def speedups(self, lever: str) -> list[float]:
        return [plain / seconds for plain, seconds in zip(self.step_s["plain"], self.step_s[lever], strict=True)]


def sweep(question: Question, *, context: Context) -> Sweep:
    """The same batch on more and more GPUs, from the first number that the model fits on."""
    gpus: list[int] = []
    step_s: dict[str, list[float]] = {lever: [] for lever in _SWEPT}
    for number in SWEEP:
        asked = replace(question, num_gpus=number, learner_gpus=None)
        try:
            found = {lever: simulate_arm(asked, lever).times.step_s for lever in _SWEPT}
        except ValueError:
            continue  # too few for this model
        gpus.append(number)
        for lever, seconds in found.items():
            step_s[lever].append(seconds)
        context.progress(
            f"{number} GPUs: plain {found['plain']:.1f} s, together {found['plain'] / found['together']:.2f} times"
        )
    if not gpus:
        raise ValueError(f"sweep: {question.shape.name} fits on no number of {question.gpu.name} up to {SWEEP[-1]}")
    return Sweep(gpus=gpus, step_s=step_s)


def write_plan_page(found: Answer, path: Path, *, scaling: Sweep | None = None) -> None:
    question = found.question
    with drawing():
        panels = [_stages_panel(found)]
        if scaling is not None:
            panels.append(_scaling_panel(scaling, question))
    low, high = found.range_of(found.speedup("together"))
    cards = [Card(label=lever, value=f"{found.speedup(lever):.2f} times plain") for lever in levers(question)[1:-1]]
    cards.append(
        Card(
            label="together",
            value=f"{found.speedup('together'):.2f} times plain",
            note=f"range {low:.2f} to {high:.2f}",
        )
    )
    notes = [("what limits it", line) for line in found.limits]
    notes += [(f"speculation, if {name}", f"{gain:.2f} times plain") for name, gain in found.sensitivity.items()]
    write_page(
        path,
        name=f"Plan: {question.shape.name} on {question.num_gpus} {question.gpu.name}",
        subtitle=(f"{question.num_rollouts} rollouts a step", question.lengths.source),
        state=" ".join(found.warnings),
        cards=cards,
        panels=panels,
        tables=table("Limits and sensitivity", notes, is_open=True)
        + f"<details open><summary>Config</summary><pre>{escape(recommended(found))}</pre></details>"
        + table("Arms", flat({lever: dict(arm.times.stages_s) for lever, arm in found.arms.items()})),
    )


def _stages_panel(found: Answer) -> Panel:
    title = "Where a step's time goes"
    figure = new_figure(0.8 + 0.34 * len(found.arms))
    axes = figure.add_subplot()
    names = [lever for lever in LEVERS if lever in found.arms]
    colours = dict(zip(STAGES, (BLUE, GREY, ORANGE, GREEN, PINK), strict=True))
    for row, lever in enumerate(names):
        left = 0.0
        for stage in STAGES:
            seconds = found.arms[lever].times.stages_s[stage]
            axes.barh(
                row, seconds, left=left, height=0.6, color=colours[stage], label=stage if row == 0 and seconds else None
            )
            left += seconds
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.set_xlabel("seconds of one RL step")
    axes.legend(ncols=len(STAGES), fontsize=7, loc="lower right")
    note = "In asynchronous training generation is what the learner waits for; the rest is hidden behind its work."
    return Panel(title=title, note=note, svg=svg(figure, title))


def _scaling_panel(scaling: Sweep, question: Question) -> Panel:
    title = f"The same {question.num_rollouts} rollouts on more GPUs"
    figure = new_figure(3.0)
    left, right = figure.subplots(1, 2)
    for lever in _SWEPT:
        left.plot(scaling.gpus, scaling.step_s[lever], "o-", color=_COLOURS[lever], markersize=3, label=lever)
        if lever != "plain":
            right.plot(scaling.gpus, scaling.speedups(lever), "o-", color=_COLOURS[lever], markersize=3, label=lever)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(scaling.gpus, [str(number) for number in scaling.gpus], fontsize=7)
        axes.set_xlabel(f"{question.gpu.name}")
    left.set_yscale("log")
    left.set_ylabel("seconds of a step")
    right.set_ylabel("speed-up over plain on as many GPUs")
    right.axhline(1, color=GREY, linewidth=1)
    left.legend(fontsize=7)
    note = "The batch stays as it is, so engines have ever fewer requests, and the longest response sets the end."
    return Panel(title=title, note=note, svg=svg(figure, title))
