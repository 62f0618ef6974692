"""Planted faults around a sampler. Certify must detect each fault."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch

from paceline.certify.lossless import Sampler
from paceline.rollout.internals.rejection_sampler import Verification

SamplerFault = Literal["residual", "temperature", "stale", "accept"]
SAMPLER_FAULTS: dict[SamplerFault, str] = {
    "residual": "the token after a rejection is drawn from p instead of the residual max(p - q, 0)",
    "temperature": "the temperature of each request is forgotten",
    "stale": "draft probabilities of another position are used",
    "accept": "2 % of the rejected draft tokens are accepted nevertheless",
}
# Dimensions as in lossless.py; R is rows with a rejected draft.


def plant(sampler: Sampler, fault: SamplerFault) -> Sampler:
    """Return the sampler with a fault in its input or output."""

    def faulty(step: Verification) -> torch.Tensor:
        match fault:
            case "temperature":
                return sampler(replace(step, temperature_B=torch.ones_like(step.temperature_B)))
            case "stale":
                of_another_BKV = None if step.proposal_BKV is None else step.proposal_BKV.roll(1, dims=1)
                return sampler(replace(step, proposal_BKV=of_another_BKV))
            case "residual":
                ids_BL = sampler(step)
                row_R, position_R = _recovered(ids_BL)
                scaled_RV = step.logits_BLV[row_R, position_R].float() / step.temperature_B[row_R, None]
                ids_BL[row_R, position_R] = scaled_RV.softmax(-1).multinomial(1).squeeze(-1).to(ids_BL.dtype)
                return ids_BL
            case "accept":
                ids_BL = sampler(step)
                row_R, position_R = _recovered(ids_BL)
                chosen_R = torch.rand(len(row_R)) < 0.02
                row_R, position_R = row_R[chosen_R], position_R[chosen_R]
                ids_BL[row_R, position_R] = step.draft_ids_BK[row_R, position_R].to(ids_BL.dtype)
                return ids_BL

    return faulty


def _recovered(ids_BL: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions of recovered tokens: the last token of every row without a bonus token."""
    emitted_B = (ids_BL >= 0).sum(1)
    row_R = (emitted_B < ids_BL.shape[1]).nonzero().squeeze(1)
    return row_R, emitted_B[row_R] - 1
