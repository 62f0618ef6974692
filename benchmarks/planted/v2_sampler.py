"""Planted faults in the rejection sampler of a running V2 engine. Certify must detect them in the engine's output.

The faults of `sampler.SAMPLER_FAULTS`, in the worker, where V2's runner calls its sampler. They are larger, because an
engine reveals less than the sampler alone: `accept` accepts every rejected draft token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.planted.sampler import SamplerFault
from paceline.rollout.worker import WorkerExtension

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs

    from paceline.rollout.engine import VllmEngine

_HEAT = 3.0
"""Factor of the fault `temperature` on the temperature, which is 1."""


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
        """Replace the planted fault; None restores the sampler."""
        from vllm.v1.worker.gpu.spec_decode import rejection_sampler, rejection_sampler_utils

        stock = rejection_sampler_utils.rejection_sample
        # The name by which V2's `RejectionSampler._verify` looks it up at every call.
        setattr(rejection_sampler, "rejection_sample", stock if fault is None else _faulty(stock, fault))  # noqa: B010


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
