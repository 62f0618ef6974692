"""Call the rejection sampler of vLLM's V1 runner on given tensors.

Behind a model, the sampler's target distribution is never exactly known. Here target and draft are inputs to the
engine's own `RejectionSampler.forward`, with its expansion of per-request temperatures, its bonus token, and on CPUs
the kernels that vLLM installs in its workers.

Relied upon:
  vllm/v1/sample/rejection_sampler.py         RejectionSampler
  vllm/v1/spec_decode/metadata.py             all fields of SpecDecodeMetadata
  vllm/v1/sample/metadata.py                  all fields of SamplingMetadata
  vllm/v1/spec_decode/llm_base_proposer.py    compute_probs_and_sample_next_token

Used by certify. Goes when vLLM offers its rejection sampler as a function of logits and drafts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from paceline.rollout.internals.platform import device_type
from paceline.rollout.internals.sampler_fix import install_cpu_kernels

if TYPE_CHECKING:
    from vllm.v1.sample.metadata import SamplingMetadata

SAMPLER = "vllm.v1.sample.rejection_sampler.RejectionSampler"

# Dimensions: B requests, K draft tokens each, L = K + 1 logit rows (the last is the bonus token's), V vocabulary.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Verification:
    """One verification step."""

    draft_ids_BK: torch.Tensor
    proposal_BKV: torch.Tensor | None
    """Distribution of the drafts: probabilities in V1, logits before temperature in V2. None for drafts without a
    distribution (n-gram, greedy), which count as one-hot."""
    logits_BLV: torch.Tensor
    """Logits of the policy, before temperature."""
    temperature_B: torch.Tensor


def rejection_sample(step: Verification) -> torch.Tensor:
    """Return vLLM's output ids_BL, with -1 after the last token of a request."""
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    install_cpu_kernels()
    device = device_type()
    num_requests, num_drafts = step.draft_ids_BK.shape
    vocabulary = step.logits_BLV.shape[-1]
    count_B = torch.arange(1, num_requests + 1, dtype=torch.int32, device=device)
    row_BL = torch.arange(num_requests * (num_drafts + 1), dtype=torch.int32, device=device).view(num_requests, -1)
    metadata = SpecDecodeMetadata(
        draft_token_ids=step.draft_ids_BK.reshape(-1).to(device, torch.int32),
        num_draft_tokens=[num_drafts] * num_requests,
        cu_num_draft_tokens=count_B * num_drafts,
        cu_num_sampled_tokens=count_B * (num_drafts + 1),
        target_logits_indices=row_BL[:, :-1].reshape(-1),
        bonus_logits_indices=row_BL[:, -1].contiguous(),
        logits_indices=row_BL.view(-1),
    )
    probs_BKV = step.proposal_BKV
    output = RejectionSampler(Sampler(logprobs_mode="processed_logprobs"))(
        metadata,
        None if probs_BKV is None else probs_BKV.reshape(-1, vocabulary).contiguous().to(device),
        step.logits_BLV.reshape(-1, vocabulary).to(device),
        _sampling_metadata(step.temperature_B.to(device)),
    )
    return output.sampled_token_ids.to("cpu", torch.int64)


def draft(logits_BKV: torch.Tensor, temperature_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample draft tokens as vLLM's probabilistic proposer does; return them and their distribution."""
    from vllm.v1.spec_decode.llm_base_proposer import compute_probs_and_sample_next_token

    install_cpu_kernels()
    device = device_type()
    num_requests, num_drafts, vocabulary = logits_BKV.shape
    temperature_N = temperature_B.to(device).repeat_interleave(num_drafts)
    ids_N, probs_NV = compute_probs_and_sample_next_token(
        logits_BKV.reshape(-1, vocabulary).to(device, copy=True), _sampling_metadata(temperature_N)
    )
    return ids_N.view(num_requests, num_drafts).cpu(), probs_NV.view(num_requests, num_drafts, vocabulary)


def _sampling_metadata(temperature_B: torch.Tensor) -> SamplingMetadata:
    """Return metadata with temperature only: no truncation, no penalties."""
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    nothing = torch.empty(0, device=temperature_B.device)
    return SamplingMetadata(
        temperature=temperature_B,
        all_greedy=False,
        all_random=True,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=nothing,
        presence_penalties=nothing,
        repetition_penalties=nothing,
        output_token_ids=[],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )
