"""Planted faults in the rejection sampler, by itself and in a running engine. Certify and monitor must detect each.

In the engine the faults are larger, because its output reveals less than the sampler: `accept` accepts every rejected
draft token. Verification by coupling has no draft probabilities and no residual, so there two of the faults differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from paceline.certify.lossless import Sampler
from paceline.rollout.internals import coupling
from paceline.rollout.internals.model_runner import Runner, runner_version
from paceline.rollout.internals.rejection_sampler import Verification
from paceline.rollout.internals.verification_monitor import V1Monitor, V2Monitor, VerificationMonitor
from paceline.rollout.worker import WorkerExtension

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.worker.gpu_worker import Worker

    from paceline.rollout.engine import VllmEngine

SamplerFault = Literal["residual", "temperature", "stale", "accept"]
SAMPLER_FAULTS: dict[SamplerFault, str] = {
    "residual": "the token after a rejection is drawn from p instead of the residual max(p - q, 0)",
    "temperature": "the temperature of each request is forgotten",
    "stale": "draft probabilities of another position are used",
    "accept": "2 % of the rejected draft tokens are accepted nevertheless",
}
COUPLED_FAULTS: dict[SamplerFault, str] = {
    "residual": "the token after a rejection is drawn with other noise",
    "temperature": "the temperature of verified tokens is tripled",
    "stale": "drafts are verified with the logits of another position",
    "accept": "rejected draft tokens are accepted nevertheless",
}
"""In a running engine that verifies by coupling."""
SMALL_SHARE = 0.02
"""Share of the rejected drafts that the fault `accept` accepts in the sampler by itself."""
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
                chosen_R = torch.rand(len(row_R)) < SMALL_SHARE
                row_R, position_R = row_R[chosen_R], position_R[chosen_R]
                ids_BL[row_R, position_R] = step.draft_ids_BK[row_R, position_R].to(ids_BL.dtype)
                return ids_BL

    return faulty


def _recovered(ids_BL: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions of recovered tokens: the last token of every row without a bonus token."""
    emitted_B = (ids_BL >= 0).sum(1)
    row_R = (emitted_B < ids_BL.shape[1]).nonzero().squeeze(1)
    return row_R, emitted_B[row_R] - 1


@dataclass(frozen=True, slots=True)
class RunningSamplerFault:
    """A fault for one engine: pass `adjust` to `VllmEngine.start`, then call `plant`."""

    fault: SamplerFault

    def adjust(self, args: AsyncEngineArgs) -> None:
        args.worker_extension_cls = f"{__name__}.{FaultySamplerExtension.__name__}"

    async def plant(self, engine: VllmEngine) -> None:
        await engine.rpc("plant_sampler_fault", self.fault)


_sound: list[Callable[..., Any]] = []
"""The function that verified before the first fault in this worker's process."""


class FaultySamplerExtension(WorkerExtension):
    """A worker with faults in its sampler."""

    def plant_sampler_fault(self, fault: SamplerFault | None) -> None:
        """Replace the planted fault; None restores the sampler. A new monitor examines every verification."""
        version = runner_version(cast("Worker", self))
        module = _sampler_module(version)
        if not _sound:  # not vLLM's own function where verification is coupled
            found = module.rejection_sample
            _sound.append(found.wrapped if isinstance(found, VerificationMonitor) else found)
        (verify,) = _sound
        if fault is not None:
            verify = (faulty_v1 if version == "v1" else _faulty_v2)(verify, fault)
        monitor = (V1Monitor if version == "v1" else V2Monitor)(verify, time_share=1e9, token_s=1e9)
        if isinstance(monitor, V1Monitor):
            monitor.draft_are_logits = coupling.verification() == "coupled"
        module.rejection_sample = monitor

    def sampler_evidence(self) -> dict[str, float]:
        """Return the figures of the monitor since the last fault was planted or removed."""
        return _sampler_module(runner_version(cast("Worker", self))).rejection_sample.figures()


def _sampler_module(version: Runner) -> Any:
    """Return the module whose global `rejection_sample` is looked up at every verification."""
    place = "vllm.v1.sample" if version == "v1" else "vllm.v1.worker.gpu.spec_decode"
    return import_module(f"{place}.rejection_sampler")


def faulty_v1(sound: Callable[..., Any], fault: SamplerFault, share: float = 1.0) -> Callable[..., Any]:
    """Return V1's `rejection_sample` with a fault. `accept` accepts a share of the rejected drafts."""

    def sample(
        draft_N: torch.Tensor,
        num_drafts: list[int],
        max_spec_len: int,
        end_B: torch.Tensor,
        draft_probs: torch.Tensor | None,
        logits_NV: torch.Tensor,
        *rest: Any,
        **options: Any,
    ) -> torch.Tensor:
        logits_NV, draft_probs = _wrong_input(logits_NV, draft_probs, fault, dim=0)
        ids_BL = sound(draft_N, num_drafts, max_spec_len, end_B, draft_probs, logits_NV, *rest, **options)
        count_B = torch.tensor(num_drafts)
        num_sampled_B = (ids_BL >= 0).sum(1)
        row_R = (num_sampled_B <= count_B).nonzero()[:, 0]
        column_R = num_sampled_B[row_R] - 1
        rejected_R = (end_B - count_B)[row_R].long() + column_R
        chosen_R = torch.rand(len(row_R)) < (share if fault == "accept" else 1.0)
        row_R, column_R, rejected_R = row_R[chosen_R], column_R[chosen_R], rejected_R[chosen_R]
        _spoil(ids_BL, row_R, column_R, logits_NV[rejected_R], draft_N[rejected_R], fault)
        return ids_BL

    return sample


def _faulty_v2(sound: Callable[..., Any], fault: SamplerFault) -> Callable[..., Any]:
    def sample(
        logits_NV: torch.Tensor,
        draft_logits: torch.Tensor | None,
        token_N: torch.Tensor,
        begin_B: torch.Tensor,
        *rest: Any,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits_NV, draft_logits = _wrong_input(logits_NV, draft_logits, fault, dim=1)
        ids_BL, num_sampled_B = sound(logits_NV, draft_logits, token_N, begin_B, *rest, **options)
        row_R = (num_sampled_B < begin_B.diff()).nonzero()[:, 0]
        column_R = num_sampled_B[row_R].long() - 1
        rejected_R = begin_B[row_R].long() + column_R
        _spoil(ids_BL, row_R, column_R, logits_NV[rejected_R], token_N[rejected_R + 1], fault)
        return ids_BL, num_sampled_B

    return sample


def _wrong_input(
    logits_NV: torch.Tensor, drafters: torch.Tensor | None, fault: SamplerFault, dim: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the policy's logits and what the drafter said, whose positions are in dimension `dim`."""
    if fault == "temperature":
        return logits_NV / _HEAT, drafters
    if fault == "stale" and coupling.verification() == "coupled":
        return logits_NV.roll(1, dims=0), drafters
    if fault == "stale" and drafters is not None:
        return logits_NV, drafters.roll(1, dims=dim)
    return logits_NV, drafters


def _spoil(
    ids_BL: torch.Tensor,
    row_R: torch.Tensor,
    column_R: torch.Tensor,
    logits_RV: torch.Tensor,
    draft_R: torch.Tensor,
    fault: SamplerFault,
) -> None:
    """Replace the tokens after rejections; -1 is no draft."""
    if fault == "residual":
        ids_BL[row_R, column_R] = logits_RV.float().softmax(-1).multinomial(1)[:, 0].to(ids_BL.dtype)
    elif fault == "accept":
        draft_R = draft_R.to(ids_BL.dtype)
        ids_BL[row_R, column_R] = torch.where(draft_R >= 0, draft_R, ids_BL[row_R, column_R])
