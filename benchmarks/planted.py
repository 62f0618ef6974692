"""Planted faults in the rejection sampler, by itself and in a running V2 engine. Certify and the monitor must detect
each.

In the engine the faults are larger, because its output reveals less than the sampler: `accept` accepts every rejected
draft token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from paceline.certify.lossless import Sampler
from paceline.rollout.internals.rejection_sampler import Verification
from paceline.rollout.internals.verification_monitor import V2Monitor
from paceline.rollout.worker import WorkerExtension

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.sample.metadata import SamplingMetadata

    from paceline.rollout.engine import VllmEngine

SamplerFault = Literal["residual", "temperature", "stale", "accept"]
SAMPLER_FAULTS: dict[SamplerFault, str] = {
    "residual": "the token after a rejection is drawn from p instead of the residual max(p - q, 0)",
    "temperature": "the temperature of each request is forgotten",
    "stale": "draft probabilities of another position are used",
    "accept": "2 % of the rejected draft tokens are accepted nevertheless",
}
_ACCEPTED = 0.02
_HEAT = 3.0
"""Factor of the fault `temperature` on the temperature, which is 1."""


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
                chosen_R = torch.rand(len(row_R)) < _ACCEPTED
                row_R, position_R = row_R[chosen_R], position_R[chosen_R]
                ids_BL[row_R, position_R] = step.draft_ids_BK[row_R, position_R].to(ids_BL.dtype)
                return ids_BL

    return faulty


def _recovered(ids_BL: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions of recovered tokens: the last token of every row without a bonus token."""
    emitted_B = (ids_BL >= 0).sum(1)
    row_R = (emitted_B < ids_BL.shape[1]).nonzero().squeeze(1)
    return row_R, emitted_B[row_R] - 1


def faulty_v1(stock: Callable[..., torch.Tensor], fault: SamplerFault) -> Callable[..., torch.Tensor]:
    """Return V1's `rejection_sample` with the fault inside, which its caller does not see."""

    def sample(
        draft_N: torch.Tensor,
        num_drafts: list[int],
        most_drafts: int,
        end_B: torch.Tensor,
        draft_NV: torch.Tensor | None,
        logits_NV: torch.Tensor,
        bonus_B1: torch.Tensor,
        metadata: SamplingMetadata,
        **options: Any,
    ) -> torch.Tensor:
        num_B = torch.tensor(num_drafts)
        if fault == "temperature" and metadata.temperature is not None:
            logits_NV = logits_NV * metadata.temperature.repeat_interleave(num_B)[:, None]
        if fault == "stale" and draft_NV is not None:
            draft_NV = draft_NV.roll(1, 0)
        p_NV = logits_NV.softmax(-1)
        ids_BL = stock(draft_N, num_drafts, most_drafts, end_B, draft_NV, logits_NV, bonus_B1, metadata, **options)
        row_R, column_R = _recovered(ids_BL)
        rejected_R = (end_B - num_B)[row_R] + column_R
        if fault == "residual":
            ids_BL[row_R, column_R] = p_NV[rejected_R].multinomial(1)[:, 0].to(ids_BL.dtype)
        if fault == "accept":
            chosen_R = torch.rand(len(row_R)) < _ACCEPTED
            ids_BL[row_R[chosen_R], column_R[chosen_R]] = draft_N[rejected_R[chosen_R]].to(ids_BL.dtype)
        return ids_BL

    return sample


@dataclass(frozen=True, slots=True)
class V2SamplerFault:
    """A fault for one engine: pass `adjust` to `VllmEngine.start`, then call `plant`."""

    fault: SamplerFault

    def adjust(self, args: AsyncEngineArgs) -> None:
        args.worker_extension_cls = f"{__name__}.{FaultySamplerExtension.__name__}"

    async def plant(self, engine: VllmEngine) -> None:
        await engine.rpc("plant_sampler_fault", self.fault)


class FaultySamplerExtension(WorkerExtension):
    """A V2 worker with faults in its sampler."""

    def plant_sampler_fault(self, fault: SamplerFault | None) -> None:
        """Replace the planted fault; None restores the sampler. A new monitor examines every verification."""
        from vllm.v1.worker.gpu.spec_decode import rejection_sampler, rejection_sampler_utils

        stock = rejection_sampler_utils.rejection_sample
        monitor = V2Monitor(stock if fault is None else _faulty(stock, fault), time_share=1e9, token_s=1e9)
        # The name by which V2's `RejectionSampler._verify` looks it up at every call.
        setattr(rejection_sampler, "rejection_sample", monitor)  # noqa: B010

    def sampler_evidence(self) -> dict[str, float]:
        """Return the figures of the monitor since the last fault was planted or removed."""
        from vllm.v1.worker.gpu.spec_decode import rejection_sampler

        return cast("V2Monitor", vars(rejection_sampler)["rejection_sample"]).figures()


def _faulty(stock: Callable[..., Any], fault: SamplerFault) -> Callable[..., Any]:
    def sample(
        logits_NV: torch.Tensor,
        draft_logits: torch.Tensor | None,
        token_N: torch.Tensor,
        begin_B: torch.Tensor,
        *rest: Any,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if fault == "temperature":
            logits_NV = logits_NV / _HEAT
        if fault == "stale" and draft_logits is not None:
            draft_logits = draft_logits.roll(1, dims=1)
        ids_BL, num_sampled_B = stock(logits_NV, draft_logits, token_N, begin_B, *rest, **options)
        if fault in ("residual", "accept"):
            row_R = (num_sampled_B < begin_B.diff()).nonzero()[:, 0]
            column_R = num_sampled_B[row_R].long() - 1
            rejected_R = begin_B[row_R].long() + column_R
            if fault == "residual":
                new_R = logits_NV[rejected_R].float().softmax(-1).multinomial(1)[:, 0]
            else:
                draft_R = token_N[rejected_R + 1].long()
                new_R = torch.where(draft_R >= 0, draft_R, ids_BL[row_R, column_R])
            ids_BL[row_R, column_R] = new_R
        return ids_BL, num_sampled_B

    return sample
