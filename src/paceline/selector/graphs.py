"""Choose the CUDA graphs of a speculating engine within a memory budget, as settings for vLLM.

A decode step of n requests with drafts of length k verifies n * (k + 1) tokens. vLLM captures a graph for each pair of
a size in `cudagraph_capture_sizes` (tokens, rounded up to a multiple of k + 1) and a draft length in its table. A step
is padded to the next captured number of tokens, and uses a graph only if there is one of its own draft length with
exactly that number. So graphs of different lengths interfere: with sizes of 3 and 4 tokens, three requests without
drafts are padded to 3 tokens, find only a graph for one request with two drafts, and run eagerly.

Two kinds of plans have no such holes. Either every number of tokens is captured, which is affordable for few requests.
Or all sizes are multiples of every k + 1: draft lengths are then 0, 1, 3, 7, 15 (k + 1 doubles), and the scheduler uses
only those. To save memory a plan gives up, in this order: lengths between the doubling ones, fine spacing of the sizes,
steps of many tokens (long drafts pay at small batches only), and finally drafts.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

Pair = tuple[int, int]  # requests, draft length

LARGEST_STEP = 2048
"""Tokens of the largest captured step: vLLM schedules at least as many per step on every GPU."""
_SPACINGS = (8, 16, 32, 64)
"""Minimum tokens between two sizes. The first is vLLM's default below 256 tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphMemory:
    """Memory model: shared + per_graph * graphs + per_token * tokens of all graphs."""

    shared_gb: float = 0.0
    per_graph_gb: float
    per_token_gb: float = 0.0

    def gigabytes(self, pairs: Iterable[Pair], mixed: Iterable[int] = ()) -> float:
        """Return the memory of graphs for these pairs, and for mixed steps (with prefill) of these sizes."""
        tokens = [*(n * (k + 1) for n, k in set(pairs)), *mixed]
        return self.shared_gb + self.per_graph_gb * len(tokens) + self.per_token_gb * sum(tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturePlan:
    draft_lengths: tuple[int, ...]
    """Draft lengths with graphs, for vLLM's `num_speculative_tokens_per_batch_size` (see `length_table`)."""
    capture_sizes: list[int]
    """vLLM's `compilation_config["cudagraph_capture_sizes"]`."""
    pairs: tuple[Pair, ...]
    """Graphs captured by vLLM with these settings."""
    ceiling: int
    """Tokens of the largest captured step."""
    gigabytes: float

    def has_holes(self, max_num_requests: int) -> bool:
        """Return whether a step with a planned draft length and at most `ceiling` tokens runs without a graph."""
        captured_at = {n * (k + 1): set[int]() for n, k in self.pairs}
        for n, k in self.pairs:
            captured_at[n * (k + 1)].add(k)
        counts = sorted(captured_at)
        for k in self.draft_lengths:
            for num_tokens in range(k + 1, min(max_num_requests * (k + 1), self.ceiling) + 1, k + 1):
                at = bisect_left(counts, num_tokens)
                if at == len(counts) or k not in captured_at[counts[at]]:
                    return True
        return False


def plan_capture(
    *, max_num_requests: int, draft_lengths: Sequence[int], memory: GraphMemory, budget_gb: float
) -> CapturePlan:
    """Choose the first plan within the budget, in the order of the module's docstring."""
    wanted = tuple(sorted({0, *draft_lengths}))
    least_gb = math.inf
    for lengths, sizes in _plans(wanted, max_num_requests):
        pairs = captured(sizes, lengths, max_num_requests)
        gigabytes = memory.gigabytes(pairs, sizes)
        plan = CapturePlan(
            draft_lengths=lengths, capture_sizes=sizes, pairs=pairs, ceiling=sizes[-1], gigabytes=gigabytes
        )
        least_gb = min(least_gb, gigabytes)
        if gigabytes <= budget_gb and not plan.has_holes(max_num_requests):
            return plan
    raise ValueError(
        f"rollout.engine.cuda_graph_gb: got {budget_gb}; must be at least {least_gb:.2f} because plain decoding is "
        f"captured for batches of up to {max_num_requests} requests"
    )


def _plans(lengths: tuple[int, ...], max_num_requests: int) -> Iterator[tuple[tuple[int, ...], list[int]]]:
    """Yield draft lengths and capture sizes, best first."""
    highest = max(max_num_requests, min(LARGEST_STEP, max_num_requests * (lengths[-1] + 1)))
    yield lengths, list(range(1, highest + 1))
    doubling = tuple(k for k in lengths if (k + 1).bit_count() == 1)
    for fewer in (lengths, doubling, (0,)):
        unit = math.lcm(*(k + 1 for k in fewer))
        if unit > _SPACINGS[-1]:
            continue
        top = min(highest, LARGEST_STEP, max_num_requests * (fewer[-1] + 1))
        for ceiling in range(top, max_num_requests - 1, -max(64, unit)):
            for spacing in _SPACINGS:
                yield fewer, capture_sizes(ceiling, math.lcm(unit, spacing), fewer, max_num_requests)


def batch_grid(max_num_requests: int) -> list[int]:
    """Return vLLM's padded batch sizes."""
    grid = [n for n in (1, 2, 4, *range(8, 256, 8), *range(256, max_num_requests + 1, 16)) if n <= max_num_requests]
    return grid if grid[-1] == max_num_requests else [*grid, max_num_requests]


def capture_sizes(ceiling: int, spacing: int, draft_lengths: Sequence[int], max_num_requests: int) -> list[int]:
    """Return multiples of the spacing up to the ceiling, powers of two below it, and the largest batch of every length.
    If that batch is no multiple, the neighboring steps of all other lengths are captured too."""
    unit = math.lcm(*(k + 1 for k in draft_lengths))
    small = [2**power for power in range(spacing.bit_length()) if unit.bit_count() == 1]
    largest = [min(ceiling, max_num_requests * (k + 1)) for k in draft_lengths]
    below = [size // (k + 1) * (k + 1) for size in largest for k in draft_lengths]
    above = [-(-size // (k + 1)) * (k + 1) for size in largest for k in draft_lengths]
    grid = {*small, *range(spacing, ceiling + 1, spacing), *below, *above}
    return sorted(size for size in grid if 0 < size <= ceiling)


def captured(sizes: Sequence[int], draft_lengths: Sequence[int], max_num_requests: int) -> tuple[Pair, ...]:
    """Return the pairs for which vLLM captures a decode graph, as `CudaGraphManager._init_candidates` of V2 does."""
    found: set[Pair] = set()
    largest = max(sizes)
    for size in sizes:
        for k in draft_lengths:
            num_requests = -(-size // (k + 1))
            if num_requests <= max_num_requests and num_requests * (k + 1) <= largest:
                found.add((num_requests, k))
    return tuple(sorted(found))


def length_table(draft_lengths: Sequence[int], max_num_requests: int) -> list[tuple[int, int, int]]:
    """Return vLLM's rows (first batch, last batch, draft length) with each draft length once: one batch size each,
    longest first, then all other batches with the shortest. With fewer batch sizes than lengths, some lengths are
    dropped, never the longest."""
    lengths = sorted(draft_lengths, reverse=True)
    if len(lengths) > max_num_requests:
        places = range(max_num_requests)
        lengths = [lengths[round(place * (len(lengths) - 1) / max(1, max_num_requests - 1))] for place in places]
    rows = [(batch, batch, length) for batch, length in enumerate(lengths, start=1)]
    first, _, length = rows[-1]
    return [*rows[:-1], (first, max_num_requests, length)]
