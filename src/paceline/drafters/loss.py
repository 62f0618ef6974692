"""Loss of a drafter's guesses against the policy's distribution.

The target is the policy's distribution at temperature 1, not the sampled token: an engine accepts a draft with
probability sum_v min(p_v, q_v) ("overlap"), and the soft target has no sampling noise. Overlap is the objective, but it
has no gradient where q has no mass, so training starts with cross-entropy and ends with overlap.

Dimension suffixes as in packing.py: A anchors, D policy hidden size, H drafter hidden size, V vocabulary, J steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch.utils.checkpoint import checkpoint

from paceline.drafters.packing import Pack

if TYPE_CHECKING:
    from paceline.drafters.checkpoint import Drafter

_CHUNK_LOGITS = 1 << 25
"""Logits in memory at once."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Guesses:
    """Result of a pass: the loss summed over all guesses, and detached statistics by step."""

    loss: torch.Tensor
    divergence_J: torch.Tensor
    """KL(p || q), summed over guesses."""
    overlap_J: torch.Tensor
    """sum_v min(p_v, q_v), summed over guesses."""
    count_J: torch.Tensor
    accept_AJ: torch.Tensor
    """min(1, q(x) / p(x)) of the sampled token x: the probability that it was drafted and accepted."""


def score_guesses(
    drafter: Drafter, pack: Pack, normed: Sequence[torch.Tensor], head_VD: torch.Tensor, *, overlap_share: float = 0.0
) -> Guesses:
    """Score guesses: `normed` holds the inputs of the drafter's output head by step; `head_VD` is the policy's head.

    The loss is (1 - `overlap_share`) x cross-entropy + `overlap_share` x (1 - overlap)."""
    num_anchors = len(pack.anchor_A)
    score = partial(_score_step, drafter, head_VD=head_VD, overlap_share=overlap_share)
    size = max(1, _CHUNK_LOGITS // len(head_VD))
    columns: list[tuple[torch.Tensor, ...]] = []
    for step, normed_AH in enumerate(normed):
        row_A = (torch.arange(num_anchors, device=pack.anchor_A.device) + step).clamp(max=num_anchors - 1)
        counted_A = pack.steps_A > step
        columns.append(_in_chunks(score, (normed_AH, pack.last_AD[row_A], pack.drawn_A[row_A], counted_A), size))
    loss_J, divergence_J, overlap_J, accept_JA = (torch.stack(column) for column in zip(*columns, strict=True))
    return Guesses(
        loss=loss_J.sum(),
        divergence_J=divergence_J,
        overlap_J=overlap_J,
        count_J=torch.stack([(pack.steps_A > step).sum() for step in range(len(normed))]),
        accept_AJ=accept_JA.T,
    )


def _in_chunks(
    score: Callable[..., tuple[torch.Tensor, ...]], rows: Sequence[torch.Tensor], size: int
) -> tuple[torch.Tensor, ...]:
    """Apply `score` to at most `size` rows at a time, to bound memory."""
    if len(rows[0]) <= size:
        return score(*rows)
    chunks = zip(*(tensor.split(size) for tensor in rows), strict=True)
    parts = [checkpoint(score, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    loss, divergence, overlap, accept = zip(*cast("list[tuple[torch.Tensor, ...]]", parts), strict=True)
    return torch.stack(loss).sum(), torch.stack(divergence).sum(), torch.stack(overlap).sum(), torch.cat(accept)


def _score_step(
    drafter: Drafter,
    normed_AH: torch.Tensor,
    last_AD: torch.Tensor,
    drawn_A: torch.Tensor,
    counted_A: torch.Tensor,
    *,
    head_VD: torch.Tensor,
    overlap_share: float,
) -> tuple[torch.Tensor, ...]:
    """Return the summed loss, divergence and overlap of one step, and the acceptance of each sampled token."""
    with torch.no_grad():
        # In float32 despite autocast: the engine verifies with this distribution.
        with torch.autocast(last_AD.device.type, enabled=False):
            p_AV = (last_AD @ head_VD.T).softmax(-1)
        p_drawn_A = p_AV.gather(-1, drawn_A[:, None])[:, 0]
        if drafter.t2d is not None:
            p_AV = p_AV[:, drafter.t2d]
    logq_AV = drafter.lm_head(normed_AH).float().log_softmax(-1)
    q_AV = logq_AV.exp()
    cross_A = -(p_AV * logq_AV).sum(-1)
    overlap_A = torch.minimum(p_AV, q_AV).sum(-1)
    loss = (((1 - overlap_share) * cross_A + overlap_share * (1 - overlap_A)) * counted_A).sum()
    with torch.no_grad():
        entropy_A = torch.special.entr(p_AV).sum(-1)
        if drafter.t2d is None:
            q_drawn_A = q_AV.gather(-1, drawn_A[:, None])[:, 0]
        else:
            draft_id_V = drafter.t2d.long().cumsum(0) - 1
            q_drawn_A = q_AV.gather(-1, draft_id_V[drawn_A][:, None].clamp(min=0))[:, 0] * drafter.t2d[drawn_A]
        accept_A = (q_drawn_A / p_drawn_A.clamp(min=1e-30)).clamp(max=1.0) * counted_A
    return loss, ((cross_A - entropy_A) * counted_A).sum().detach(), (overlap_A * counted_A).sum().detach(), accept_A
