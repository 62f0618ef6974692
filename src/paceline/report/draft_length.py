"""How far the engines drafted over the time of one step, and what was accepted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.report.page import BLUE, GREEN, GREY, ORANGE, Panel, new_figure, svg
from paceline.report.recorded import Floats, RecordedRun, StepDrafts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Curves:
    """One step on a common grid of time. NaN where nothing was generated, or nothing verified."""

    edges_s: Floats
    """Seconds since the first bin."""
    draft_length: Floats
    """Mean over the steps of all engines."""
    by_engine: dict[str, Floats]
    """Mean over the steps of each engine."""
    accepted_length: Floats
    requests: Floats
    """Mean batch of each engine, summed over engines."""


def draft_length_panels(run: RecordedRun, step: int | None = None) -> list[Panel]:
    """One picture, of `step` if it was recorded, or of a late step with much to show; nothing without speculation."""
    if not run.drafts:
        return []
    late = run.drafts[len(run.drafts) // 2 :]
    chosen = next((d for d in run.drafts if d.step == step), max(late, key=lambda drafts: len(drafts.begin_s)))
    return [_panel(chosen, curves(chosen))]


def curves(drafts: StepDrafts) -> Curves:
    """Put the bins of all engines on one grid. Bins are aligned to their width, so the widest of them holds the others
    whole."""
    width_s, first_s = float(drafts.width_s.max()), float(drafts.begin_s.min())
    number = np.floor((drafts.begin_s - first_s) / width_s + 1e-6).astype(np.int64)
    size = int(number.max()) + 1

    def summed(values: Floats, chosen: np.ndarray | slice = slice(None)) -> Floats:
        return np.bincount(number[chosen], values[chosen], minlength=size).astype(np.float64)

    def ratio(part: Floats, whole: Floats) -> Floats:
        return np.divide(part, whole, out=np.full(size, np.nan), where=whole > 0)

    by_engine: dict[str, Floats] = {}
    requests = np.zeros(size)
    for index, name in enumerate(drafts.engines):
        own = drafts.engine == index
        num_steps = summed(drafts.num_steps, own)
        by_engine[name] = ratio(summed(drafts.draft_length, own), num_steps)
        requests += np.nan_to_num(ratio(summed(drafts.num_requests, own), num_steps))
    return Curves(
        edges_s=np.arange(size + 1, dtype=np.float64) * width_s,
        draft_length=ratio(summed(drafts.draft_length), summed(drafts.num_steps)),
        by_engine=by_engine,
        accepted_length=1 + ratio(summed(drafts.num_accepted), summed(drafts.num_verifications)),
        requests=requests,
    )


def _panel(drafts: StepDrafts, found: Curves) -> Panel:
    figure = new_figure(3.6)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[1, 1.8])
    top.stairs(found.requests, found.edges_s, fill=True, color=BLUE, alpha=0.85, label="requests in flight")
    top.set_ylabel("requests")
    top.set_ylim(bottom=0)
    if len(found.by_engine) > 1:
        for index, values in enumerate(found.by_engine.values()):
            label = "draft length of each engine" if index == 0 else None
            bottom.stairs(values, found.edges_s, baseline=None, color=GREY, linewidth=0.8, alpha=0.7, label=label)
    bottom.stairs(
        found.draft_length, found.edges_s, baseline=None, color=ORANGE, linewidth=2.0, label="draft length, mean"
    )
    middle_s = (found.edges_s[1:] + found.edges_s[:-1]) / 2
    bottom.plot(
        middle_s, found.accepted_length, color=GREEN, linewidth=1.6, marker="o", markersize=3, label="accepted length"
    )
    bottom.set_ylabel("tokens")
    bottom.set_ylim(bottom=0)
    bottom.set_xlim(0, found.edges_s[-1])
    bottom.set_xlabel("seconds since the first engine step of the phase")
    figure.legend(loc="outside upper left", ncols=4, handlelength=1.4)
    finite = found.draft_length[np.isfinite(found.draft_length)]
    first, last = float(finite[: max(1, len(finite) // 4)].mean()), float(finite[-max(1, len(finite) // 4) :].mean())
    title = f"Step {drafts.step}: engines drafted {first:.1f} tokens at first and {last:.1f} in the end"
    note = (
        "Draft length that the scheduler chose, and tokens that a verification then gave (accepted length: accepted "
        f"draft tokens plus one). Bins of {found.edges_s[1]:g} s, over {len(drafts.engines)} engine(s)."
    )
    return Panel(title=title, note=note, svg=svg(figure, title))
