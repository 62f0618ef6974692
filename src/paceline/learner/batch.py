"""Pack samples into forward passes of each rank, as padded tensors.

Rollouts are padded on the right without an attention mask: causal attention never sees the padding, and without a mask
it takes its fast path. Packing several rollouts into one row would need a varlen kernel, which CPUs lack. Rollouts of
similar length share a pass, and a new pass starts where it saves more padding than it costs.

Dimension suffixes: B rollouts, S padded tokens (prompt and response), T padded response tokens, N response tokens
without padding, R rows of one rollout per rank.
"""

# pyright: reportUnknownMemberType=false
# torch.from_numpy is untyped.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paceline.types import Sample

if TYPE_CHECKING:
    import torch

_PASS_COST = 1 / 16
"""Cost of a pass (launches, gathering the weights) in tokens, as a share of the budget."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PaddedBatch:
    indices: tuple[int, ...]
    """Indices of the samples; empty if the rank has none left."""
    input_ids_BS: torch.Tensor
    position_N: torch.Tensor
    """Index into the flattened [B, S] of the logits of each response token, which is the token before it."""
    target_N: torch.Tensor
    mask_BT: torch.Tensor
    old_logp_BT: torch.Tensor
    """Denominator of the ratio: the learner's log-probabilities for corrected samples, otherwise the engine's."""
    weight_BT: torch.Tensor
    advantage_B: torch.Tensor


def plan_passes(lengths: Sequence[int], *, budget: int, world_size: int) -> list[list[tuple[int, ...]]]:
    """Return sample indices by rank and pass. All ranks have the same number of passes; some may be empty. Samples are
    dealt to ranks by decreasing length, which balances the load and gives pass n about the same shape on every rank. A
    pass has at most `budget` padded tokens, but at least one sample."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    parts = pairwise(_cut(np.array([lengths[i] for i in order[::world_size]], np.int64), budget))
    slices = [slice(begin, end) for begin, end in parts]
    return [[tuple(order[rank::world_size][part]) for part in slices] for rank in range(world_size)]


def _cut(width_R: npt.NDArray[np.int64], budget: int) -> list[int]:
    """Return the pass bounds that minimize padded tokens plus pass costs, for rows of decreasing width."""
    least = np.zeros(len(width_R) + 1)  # of the rows before each bound
    came_from = [0] * len(least)
    first = 0
    for end in range(1, len(least)):
        # Rows that exceed the budget also exceed it with more rows, so `first` only increases.
        while first < end - 1 and width_R[first] * (end - first) > budget:
            first += 1
        starts = np.arange(first, end)
        sums = least[first:end] + width_R[first:end] * (end - starts) + _PASS_COST * budget
        came_from[end] = first + int(sums.argmin())
        least[end] = sums.min()
    bounds = [len(width_R)]
    while bounds[-1]:
        bounds.append(came_from[bounds[-1]])
    return bounds[::-1]


def draw(costs: Sequence[float], budget: float, rng: np.random.Generator, *, fewest: int = 0) -> list[int]:
    """Draw random samples up to the budget, and at least `fewest`. Stop at the first sample that does not fit:
    continuing with shorter ones would bias the draw against long responses."""
    order = rng.permutation(len(costs))
    num_fitting = int(np.searchsorted(np.cumsum(np.asarray(costs, np.float64)[order]), budget, side="right"))
    return order[: max(fewest, num_fitting)].tolist()


def make_batch(samples: Sequence[Sample], indices: tuple[int, ...], device: torch.device) -> PaddedBatch:
    """Pad the samples of one pass. An empty pass is one masked token with zero gradients."""
    import torch

    if not indices:
        zero = torch.zeros(1, dtype=torch.long, device=device)
        return PaddedBatch(
            indices=(),
            input_ids_BS=zero[None],
            position_N=zero,
            target_N=zero,
            mask_BT=torch.zeros(1, 1, dtype=torch.bool, device=device),
            old_logp_BT=torch.zeros(1, 1, device=device),
            weight_BT=torch.ones(1, 1, device=device),
            advantage_B=torch.zeros(1, device=device),
        )
    chosen = [samples[i] for i in indices]
    num_columns = max(len(sample.token_ids) for sample in chosen)
    num_responses = max(1, *(sample.num_response_tokens for sample in chosen))
    input_ids_BS = np.zeros((len(chosen), num_columns), np.int64)
    mask_BT = np.zeros((len(chosen), num_responses), np.bool_)
    old_logp_BT = np.zeros((len(chosen), num_responses), np.float32)
    weight_BT = np.ones((len(chosen), num_responses), np.float32)
    positions: list[np.ndarray] = []
    for row, sample in enumerate(chosen):
        input_ids_BS[row, : len(sample.token_ids)] = sample.token_ids
        mask_BT[row, : sample.num_response_tokens] = True
        old_logp_BT[row, : sample.num_response_tokens] = sample.logp if sample.old_logp is None else sample.old_logp
        if sample.weight is not None:
            weight_BT[row, : sample.num_response_tokens] = sample.weight
        positions.append(row * num_columns + np.arange(sample.num_prompt_tokens - 1, len(sample.token_ids) - 1))
    targets = [sample.token_ids[sample.num_prompt_tokens :] for sample in chosen]

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return PaddedBatch(
        indices=indices,
        input_ids_BS=tensor(input_ids_BS),
        position_N=tensor(np.concatenate(positions)),
        target_N=tensor(np.concatenate(targets).astype(np.int64)),
        mask_BT=tensor(mask_BT),
        old_logp_BT=tensor(old_logp_BT),
        weight_BT=tensor(weight_BT),
        advantage_B=tensor(np.array([sample.advantage for sample in chosen], np.float32)),
    )
