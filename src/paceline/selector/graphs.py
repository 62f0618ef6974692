"""Chooses the (batch, draft length) pairs to capture as CUDA graphs inside a memory budget, as settings for vLLM.

A decode step of n requests with drafts of length k verifies n * (k + 1) tokens, and vLLM captures graphs by that number
(`cudagraph_capture_sizes`). Its own choice follows one table fixed at start; a selector may ask for any k at any batch,
and capturing every pair costs as many times the memory as there are draft lengths (the TLT paper: 7.81 GB for one
strategy, 30.39 GB for all of its pool). But long drafts pay at small batches only: once n * (k + 1) tokens make the
step bound by compute, verifying costs more than it yields. So pairs are kept below a ceiling of tokens, the highest
that the budget allows, and k = 0 at every batch. A pair without a graph still runs, eagerly, and the selector measures
it as what it then is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Pair = tuple[int, int]  # requests, draft length


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphMemory:
    """Gigabytes = shared + per_graph * graphs + per_token * tokens of all graphs; two captures on a machine give the
    numbers."""

    shared_gb: float = 0.0
    per_graph_gb: float
    per_token_gb: float = 0.0

    def gigabytes(self, pairs: Iterable[Pair]) -> float:
        tokens = [n * (k + 1) for n, k in set(pairs)]
        return self.shared_gb + self.per_graph_gb * len(tokens) + self.per_token_gb * sum(tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturePlan:
    pairs: tuple[Pair, ...]
    ceiling: int
    """Largest number of tokens in a captured step that verifies drafts."""
    gigabytes: float

    @property
    def capture_sizes(self) -> list[int]:
        """vLLM's `compilation_config["cudagraph_capture_sizes"]`."""
        return sorted({n * (k + 1) for n, k in self.pairs})

    def draft_length_at(self, num_requests: int) -> int:
        """Longest captured draft length for this batch, which is padded to the next captured one."""
        return max((k for n, k in self.pairs if n >= num_requests), default=0)


def batch_grid(max_num_requests: int) -> list[int]:
    """Batch sizes as vLLM spaces them: others are padded to the next."""
    grid = [n for n in (1, 2, 4, *range(8, 256, 8), *range(256, max_num_requests + 1, 16)) if n <= max_num_requests]
    return grid if grid[-1] == max_num_requests else [*grid, max_num_requests]


def pairs_below(ceiling: int, batches: Sequence[int], draft_lengths: Sequence[int]) -> tuple[Pair, ...]:
    return tuple((n, k) for n in batches for k in sorted({0, *draft_lengths}) if k == 0 or n * (k + 1) <= ceiling)


def plan_capture(
    *, max_num_requests: int, draft_lengths: Sequence[int], memory: GraphMemory, budget_gb: float
) -> CapturePlan:
    """Choose the highest ceiling that fits into the budget."""
    batches = batch_grid(max_num_requests)
    ceilings = sorted({0, *(n * (k + 1) for n in batches for k in draft_lengths)}, reverse=True)
    for ceiling in ceilings:
        pairs = pairs_below(ceiling, batches, draft_lengths)
        gigabytes = memory.gigabytes(pairs)
        if gigabytes <= budget_gb:
            return CapturePlan(pairs=pairs, ceiling=ceiling, gigabytes=gigabytes)
    raise ValueError(
        f"budget_gb: got {budget_gb}; must be at least {memory.gigabytes((n, 0) for n in batches):.2f} because plain "
        f"decoding is captured at {len(batches)} batch sizes"
    )
