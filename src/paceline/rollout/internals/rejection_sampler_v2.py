"""Call the rejection sampler of vLLM's V2 runner, used on GPUs, on given tensors.

V2 verifies with its own Triton kernels, which derive noise from the request's seed and the token's position, and keeps
the drafter's logits before temperature instead of probabilities. They are called as in `RejectionSampler._verify`, on
the GPU, or on the CPU under Triton's interpreter.

Relied upon:
  vllm/v1/worker/gpu/spec_decode/rejection_sampler_utils.py   rejection_sample
  vllm/v1/worker/gpu/sample/gumbel.py                         apply_temperature, gumbel_sample

Used by certify. Goes when vLLM offers its rejection sampler as a function of logits and drafts.
"""

from __future__ import annotations

import torch

from paceline.rollout.internals.platform import device_type
from paceline.rollout.internals.rejection_sampler import Verification

SAMPLER = "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils.rejection_sample"

# Dimensions: B requests, K draft tokens each, L = K + 1 logit rows (the last is the bonus token's), V vocabulary.


def rejection_sample(step: Verification) -> torch.Tensor:
    """Return vLLM's output ids_BL, with -1 after the last token of a request."""
    from vllm.v1.worker.gpu.sample.gumbel import apply_temperature
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils

    device = device_type()
    num_requests, num_drafts = step.draft_ids_BK.shape
    num_rows = num_drafts + 1
    request_B = torch.arange(num_requests, dtype=torch.int32, device=device)
    request_N = request_B.repeat_interleave(num_rows)
    temperature_B = step.temperature_B.to(device)
    # Row 0 of a request holds its last emitted token; drafts follow.
    input_BL = torch.nn.functional.pad(step.draft_ids_BK, (1, 0)).to(device)
    logits_NV = step.logits_BLV.reshape(-1, step.logits_BLV.shape[-1]).float().to(device, copy=True)
    apply_temperature(logits_NV, request_N, temperature_B)
    ids_BL, num_sampled_B = rejection_sampler_utils.rejection_sample(
        logits_NV,
        None if step.proposal_BKV is None else step.proposal_BKV.to(device),
        input_BL.reshape(-1),
        torch.arange(num_requests + 1, dtype=torch.int32, device=device) * num_rows,
        torch.arange(num_rows, device=device).repeat(num_requests),
        request_B,
        request_N,
        torch.arange(num_rows, dtype=torch.int32, device=device).repeat(num_requests),
        temperature_B,
        _seeds(num_requests, device),
        num_drafts,
    )
    column_L = torch.arange(num_rows, device=device)
    return ids_BL.masked_fill(column_L >= num_sampled_B[:, None], -1).cpu()


def draft(logits_BKV: torch.Tensor, temperature_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample draft tokens as V2's probabilistic speculators do; return them and their logits."""
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    device = device_type()
    num_requests, num_drafts, vocabulary = logits_BKV.shape
    cache_BKV = torch.zeros(logits_BKV.shape, dtype=logits_BKV.dtype, device=device)
    position_N = torch.arange(num_drafts, device=device).repeat(num_requests)
    ids_N = gumbel_sample(
        logits_BKV.reshape(-1, vocabulary).to(device),
        torch.arange(num_requests, dtype=torch.int32, device=device).repeat_interleave(num_drafts),
        temperature_B.to(device),
        _seeds(num_requests, device),
        position_N,
        apply_temperature=True,
        is_drafting=True,
        logits_cache=cache_BKV,
        logits_cache_col=position_N,
    )
    return ids_N.view(num_requests, num_drafts).cpu(), cache_BKV


def _seeds(num_requests: int, device: str) -> torch.Tensor:
    """Return a random seed per request, as vLLM does for requests without one."""
    return torch.randint(2**62, (num_requests,), dtype=torch.int64).to(device)
