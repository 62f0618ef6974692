"""Best draft length per batch size, acceptance and the cost file, from measured steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from paceline.selector.cost import Step
from paceline.selector.cost_file import Conditions, CostPoint, Costs

Cells = dict[tuple[int, int], list[Step]]
"""Measured steps by batch size and draft length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    cells: Cells
    costs: Costs

    @property
    def batches(self) -> list[int]:
        return sorted({batch for batch, _ in self.cells})

    @property
    def lengths(self) -> list[int]:
        return sorted({k for _, k in self.cells})

    def rate(self, batch: int, k: int) -> float:
        steps = self.cells[batch, k]
        return sum(step.num_emitted for step in steps) / sum(step.seconds for step in steps)

    def best(self, batch: int) -> int:
        """Return the draft length with the most tokens per second."""
        return max(self.lengths, key=lambda k: self.rate(batch, k))

    def gain(self, batch: int) -> float:
        """Return the speed-up of the best draft length over plain decoding."""
        return self.rate(batch, self.best(batch)) / self.rate(batch, 0)

    def figures(self) -> dict[str, float]:
        figures = {f"best_length_{batch}": float(self.best(batch)) for batch in self.batches}
        figures |= {f"gain_{batch}": self.gain(batch) for batch in self.batches}
        return figures | {f"acceptance_{at}": value for at, value in enumerate(self.costs.acceptance, start=1)}

    def details(self) -> dict[str, Any]:
        return {
            "tokens_per_s": {
                f"batch {batch}": {str(k): self.rate(batch, k) for k in self.lengths} for batch in self.batches
            },
            "costs": self.costs.model_dump(mode="json"),
        }


def costs_of(cells: Cells, conditions: Conditions) -> Costs:
    points = tuple(
        CostPoint(
            num_requests=batch,
            verified=k,
            drafted=k,
            context_tokens=int(median(step.context_tokens for step in steps)),
            seconds=median(step.seconds for step in steps),
            num_steps=len(steps),
        )
        for (batch, k), steps in sorted(cells.items())
        if steps
    )
    acceptance, trials = _acceptance([step for steps in cells.values() for step in steps])
    return Costs(points=points, acceptance=acceptance, num_trials=trials, measured_on=conditions)


def _acceptance(steps: Sequence[Step]) -> tuple[tuple[float, ...], int]:
    """Return acceptance by position, among requests with a draft token there and all earlier ones accepted."""
    longest = max(len(step.accepted_at) for step in steps)
    reached, accepted = [0] * longest, [0] * longest
    for step in steps:
        before = step.num_verifications
        for position, here in enumerate(step.accepted_at):
            reached[position] += before
            accepted[position] += here
            before = here
    return tuple(a / max(r, 1) for a, r in zip(accepted, reached, strict=True)), reached[0]
