"""Plot draft length and accepted length over the time of one step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.report.plots import BLUE, GRAY, GREEN, ORANGE, Panel, new_figure, panel
from paceline.report.recorded import Floats, RecordedRun, StepDrafts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Curves:
    """One step on a common grid of time. NaN in bins without generated or verified tokens."""

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
    """Return a plot of `step`, or of the longest step in the second half; none for runs without speculation."""
    if not run.drafts:
        return []
    late = run.drafts[len(run.drafts) // 2 :]
    chosen = next((d for d in run.drafts if d.step == step), max(late, key=lambda drafts: len(drafts.begin_s)))
    return [_panel(chosen, curves(chosen))]


def curves(drafts: StepDrafts) -> Curves:
    """Put the bins of all engines on one grid of the widest bins; they hold the others whole."""
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
    edges_s, length = found.edges_s, found.draft_length
    top.stairs(found.requests, edges_s, fill=True, color=BLUE, alpha=0.85, label="requests in flight")
    top.set(ylabel="requests", ylim=(0, None))
    if len(found.by_engine) > 1:
        for index, values in enumerate(found.by_engine.values()):
            label = "draft length of each engine" if index == 0 else None
            bottom.stairs(values, edges_s, baseline=None, color=GRAY, linewidth=0.8, alpha=0.7, label=label)
    bottom.stairs(length, edges_s, baseline=None, color=ORANGE, linewidth=2.0, label="draft length, mean")
    middle_s = (edges_s[1:] + edges_s[:-1]) / 2
    style = {"color": GREEN, "linewidth": 1.6, "marker": "o", "markersize": 3}
    bottom.plot(middle_s, found.accepted_length, label="accepted length", **style)
    xlabel = "seconds since the first engine step of the phase"
    bottom.set(xlabel=xlabel, ylabel="tokens", xlim=(0, edges_s[-1]), ylim=(0, None))
    finite = length[np.isfinite(length)]
    quarter = max(1, len(finite) // 4)
    first, last = finite[:quarter].mean(), finite[-quarter:].mean()
    title = f"Step {drafts.step}: engines drafted {first:.1f} tokens at first and {last:.1f} at the end"
    note = (
        "Draft length chosen by the scheduler, and tokens per verification (accepted draft tokens plus one). "
        f"Bins of {edges_s[1]:g} s, over {len(drafts.engines)} engine(s)."
    )
    return panel(figure, title, note)
