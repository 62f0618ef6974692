"""Write a plan as one HTML page, and sweep it over numbers of GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.context import Context
from paceline.plan.answer import Answer, simulate_arm
from paceline.plan.question import Question
from paceline.plan.recipe import recommended
from paceline.plan.run_model import STAGES
from paceline.report.plots import (
    BLUE,
    GRAY,
    GREEN,
    ORANGE,
    PINK,
    RED,
    Panel,
    bar_rows,
    count_axis,
    drawing,
    new_figure,
    new_plot,
    panel,
)
from paceline.report.render import write_page

SWEEP = tuple(2**power for power in range(3, 13))
_SWEPT = {"plain": GRAY, "speculation": BLUE, "asynchrony": GREEN, "together": RED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    gpus: Sequence[int]
    step_s: Mapping[str, Sequence[float]]

    def speedups(self, lever: str) -> list[float]:
        return [plain / seconds for plain, seconds in zip(self.step_s["plain"], self.step_s[lever], strict=True)]


def sweep(question: Question, *, context: Context) -> Sweep:
    """Simulate the same batch on more and more GPUs, from the first number that the model fits on."""
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
        gain = found["plain"] / found["together"]
        context.progress(f"{number} GPUs: plain {found['plain']:.1f} s, together {gain:.2f} times")
    if not gpus:
        raise ValueError(f"sweep: {question.shape.name} fits on no number of {question.gpu.name} up to {SWEEP[-1]}")
    return Sweep(gpus=gpus, step_s=step_s)


def write_plan_page(found: Answer, path: Path, *, scaling: Sweep | None = None) -> None:
    with drawing():
        panels = [_stages_panel(found)]
        if scaling is not None:
            panels.append(_scaling_panel(scaling, found.question))
    notes = [("limit", line) for line in found.limits]
    notes += [(f"speculation, if {name}", f"{gain:.2f} times plain") for name, gain in found.sensitivity.items()]
    write_page(
        path,
        "plan.html",
        answer=found,
        levers=list(found.arms)[1:],
        notes=notes,
        config=recommended(found),
        stages={lever: dict(arm.times.stages_s) for lever, arm in found.arms.items()},
        panels=panels,
    )


def _stages_panel(found: Answer) -> Panel:
    figure, axes = new_plot(0.8 + 0.34 * len(found.arms))
    names = list(found.arms)
    left = [0.0] * len(names)
    for stage, color in zip(STAGES, (BLUE, GRAY, ORANGE, GREEN, PINK), strict=True):
        seconds = [found.arms[lever].times.stages_s[stage] for lever in names]
        axes.barh(range(len(names)), seconds, 0.6, left, color=color, label=stage if any(seconds) else None)
        left = [start + width for start, width in zip(left, seconds, strict=True)]
    bar_rows(axes, names)
    axes.set_xlabel("seconds of one RL step")
    note = "In asynchronous training, generation is the learner's wait; the rest overlaps with its work."
    return panel(figure, "Time of a step by stage", note, columns=len(STAGES))


def _scaling_panel(scaling: Sweep, question: Question) -> Panel:
    figure = new_figure(3.0)
    left, right = figure.subplots(1, 2)
    for lever, color in _SWEPT.items():
        left.plot(scaling.gpus, scaling.step_s[lever], "o-", color=color, markersize=3, label=lever)
        if lever != "plain":
            right.plot(scaling.gpus, scaling.speedups(lever), "o-", color=color, markersize=3)
    for axes in (left, right):
        count_axis(axes, scaling.gpus)
        axes.set_xlabel(question.gpu.name)
    left.set(yscale="log", ylabel="seconds of a step")
    right.set_ylabel("speedup over plain on as many GPUs")
    right.axhline(1, color=GRAY, linewidth=1)
    note = "The batch stays constant: each engine has fewer requests, and the longest response sets the end."
    return panel(figure, f"The same {question.num_rollouts} rollouts on more GPUs", note)
