"""Comparison of the tokens of two runs: rollouts of the same id in the same step are equal, or where they first differ.

Every step records a checksum of each rollout's tokens. The position of a difference is known where both runs have kept
the rollout (`run.keep_rollouts`). An update is compared by its gradient norm: policies are equal as long as these are.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.metrics import stream_metrics
from paceline.orchestrator.batch_log import read_group
from paceline.report.plots import BLUE, ORANGE, Panel, new_plot, panel, step_axis
from paceline.report.recorded import RecordedRun
from paceline.types import RolloutId, Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDifference:
    step: int
    rollout_id: RolloutId
    position: int | None
    """None if one of the runs has not kept the rollout."""
    num_equal_tokens: int
    """Tokens of equal rollouts before it, in the order of steps and ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison:
    """Rollouts that both runs have recorded."""

    num_steps: int
    num_rollouts: int
    num_equal: int
    first: TokenDifference | None
    first_update: int | None
    """First step whose updates differ."""

    def words(self) -> str:
        if not self.num_rollouts:
            return "The runs have no recorded rollouts in common."
        if (first := self.first) is None:
            return f"All {self.num_rollouts:,} rollouts of the {self.num_steps} common steps have equal tokens."
        where = "" if first.position is None else f", at token {first.position}"
        if self.first_update is not None and self.first_update < first.step:
            policies = f"The policies differed before it: the update of step {self.first_update} did."
        else:
            policies = "The policies were equal until then."
        return (
            f"{self.num_equal:,} of {self.num_rollouts:,} rollouts of the {self.num_steps} common steps have equal "
            f"tokens. The first difference is in step {first.step}, rollout {first.rollout_id}{where}, after "
            f"{first.num_equal_tokens:,} equal tokens. {policies}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recorded:
    sums: dict[int, dict[RolloutId, str]]
    lengths: dict[RolloutId, int]
    updates: dict[int, float]
    """Gradient norms by step."""


def compare_tokens(run: Path, other: Path, only: Collection[int] | None = None) -> RunComparison:
    """Compare the recorded rollouts of two run directories; `only` limits the steps."""
    mine, theirs = _read(run), _read(other)
    common = mine.sums.keys() & theirs.sums.keys()
    steps = sorted(common if only is None else common.intersection(only))
    num_rollouts = num_equal = num_tokens = 0
    first: TokenDifference | None = None
    for step in steps:
        for rollout_id in sorted(mine.sums[step].keys() & theirs.sums[step].keys()):
            num_rollouts += 1
            if mine.sums[step][rollout_id] == theirs.sums[step][rollout_id]:
                num_equal += 1
                num_tokens += mine.lengths[rollout_id] if first is None else 0
            elif first is None:
                position = _first_difference(run, other, rollout_id)
                first = TokenDifference(
                    step=step, rollout_id=rollout_id, position=position, num_equal_tokens=num_tokens + (position or 0)
                )
    updates = sorted(mine.updates.keys() & theirs.updates.keys())
    return RunComparison(
        num_steps=len(steps),
        num_rollouts=num_rollouts,
        num_equal=num_equal,
        first=first,
        first_update=next((step for step in updates if mine.updates[step] != theirs.updates[step]), None),
    )


def token_checksums(run: Path) -> dict[int, dict[RolloutId, str]]:
    """Return checksums of the tokens of all recorded rollouts by step."""
    return _read(run).sums


def equality_panel(run: RecordedRun, other: RecordedRun, comparison: RunComparison) -> Panel:
    """Draw both reward curves, one on top of the other."""
    figure, axes = new_plot(3.0)
    name = other.name if other.name != run.name else f"{other.name} (other)"
    axes.plot(other.steps, other.series("reward/mean"), color=ORANGE, linewidth=7, alpha=0.5, label=name)
    axes.plot(run.steps, run.series("reward/mean"), "o-", color=BLUE, linewidth=1.6, markersize=4, label=run.name)
    axes.set_ylabel("mean reward")
    steps = (*run.steps, *other.steps)
    step_axis(axes, min(steps), max(steps))
    title = f"{comparison.num_equal:,} of {comparison.num_rollouts:,} rollouts have equal tokens in both runs"
    return panel(figure, title, comparison.words())


def first_difference(mine: Tokens, theirs: Tokens) -> int | None:
    """Return the first position at which two responses differ, also by their lengths; None if they are equal."""
    shared = min(len(mine), len(theirs))
    different = np.flatnonzero(mine[:shared] != theirs[:shared])
    if len(different):
        return int(different[0])
    return None if len(mine) == len(theirs) else shared


def _first_difference(run: Path, other: Path, rollout_id: RolloutId) -> int | None:
    mine, theirs = (read_group(path / "batches", rollout_id.group_id.number) for path in (run, other))
    if mine is None or theirs is None or mine.group_id != theirs.group_id:
        return None
    return first_difference(mine.rollouts[rollout_id.index].token_ids, theirs.rollouts[rollout_id.index].token_ids)


def _read(run: Path) -> _Recorded:
    found = _Recorded(sums={}, lengths={}, updates={})
    for kind, record in stream_metrics(run / "metrics.jsonl"):
        if kind == "step":
            found.updates[record["step"]] = record["metrics"].get("policy/grad_norm", 0.0)
        elif kind == "rollouts" and "tokens" in record:
            columns = zip(record["group"], record["index"], record["tokens"], record["length"], strict=True)
            sums: dict[RolloutId, str] = {}
            for group, index, checksum, length in columns:
                rollout_id = RolloutId.parse(f"{group}:{index}")
                sums[rollout_id], found.lengths[rollout_id] = checksum, length
            found.sums[record["step"]] = sums
    return found
