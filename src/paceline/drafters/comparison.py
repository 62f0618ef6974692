"""Comparison of a trained drafter with the published one on held-out documents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from paceline.config import DrafterTrainingConfig
from paceline.drafters.drift import Verdict, judge
from paceline.drafters.trainer import State, evaluate, load_weights

if TYPE_CHECKING:
    import torch

    from paceline.drafters.checkpoint import Drafter
    from paceline.drafters.packing import Document


def compare(
    drafter: Drafter,
    states: Iterable[State],
    documents: Sequence[Document],
    head_VD: torch.Tensor,
    *,
    draft_length: int,
    config: DrafterTrainingConfig,
) -> Verdict | None:
    """Judge the second of two states against the first; return None with too few tokens.

    Both are loaded into `drafter`, which has the second state's weights afterward."""
    if 4 * sum(document.num_anchors for document in documents) < config.heldout_tokens:
        return None
    found = []
    for state in states:
        load_weights(drafter, state)
        found.append(evaluate(drafter, documents, head_VD, draft_length=draft_length))
    before, after = found
    lengths = before.accepted_length[-1], after.accepted_length[-1]
    return judge(before=lengths[0], after=lengths[1], num_tokens=after.num_tokens, config=config)
