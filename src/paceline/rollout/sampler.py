"""vLLM's own rejection sampler, called on tensors that the caller chose, and the settings that would make it lossy.

An engine hides its sampler behind a model, so that what it draws from is never exactly known. Here the target and the draft are
given, and the sampler is the one that the engine runs: `RejectionSampler.forward`, with the expansion of per-request temperatures
and the sampling of the bonus token in it, and on the CPU with the kernels that vLLM installs in its workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from paceline.rollout import compat

if TYPE_CHECKING:
    from vllm.v1.sample.metadata import SamplingMetadata

# Dimensions: B requests, K draft tokens each, L = K + 1 logit rows (the last is the bonus token's), V vocabulary.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Verification:
    """One verification step."""

    draft_ids_BK: torch.Tensor
    draft_probs_BKV: torch.Tensor | None
    """What the drafts were drawn from; None for drafts without a distribution (n-gram, greedy), which count as one-hot."""
    logits_BLV: torch.Tensor
    """The policy's, before temperature."""
    temperature_B: torch.Tensor


def rejection_sample(step: Verification) -> torch.Tensor:
    """What vLLM emits: ids_BL, with -1 after the last emitted token of a request."""
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    compat.install_cpu_kernels()
    num_requests, num_drafts = step.draft_ids_BK.shape
    vocabulary = step.logits_BLV.shape[-1]
    row_BL = torch.arange(num_requests * (num_drafts + 1), dtype=torch.int32).view(num_requests, num_drafts + 1)
    metadata = SpecDecodeMetadata(
        draft_token_ids=step.draft_ids_BK.reshape(-1).to(torch.int32),
        num_draft_tokens=[num_drafts] * num_requests,
        cu_num_draft_tokens=torch.arange(1, num_requests + 1, dtype=torch.int32) * num_drafts,
        cu_num_sampled_tokens=torch.arange(1, num_requests + 1, dtype=torch.int32) * (num_drafts + 1),
        target_logits_indices=row_BL[:, :-1].reshape(-1),
        bonus_logits_indices=row_BL[:, -1].contiguous(),
        logits_indices=row_BL.view(-1),
    )
    probs_BKV = step.draft_probs_BKV
    sampler = RejectionSampler(Sampler(logprobs_mode="processed_logprobs"))
    output = sampler(
        metadata,
        None if probs_BKV is None else probs_BKV.reshape(-1, vocabulary).contiguous(),
        step.logits_BLV.reshape(-1, vocabulary),
        _sampling_metadata(step.temperature_B),
    )
    return output.sampled_token_ids.to(torch.int64)


def draft(logits_BKV: torch.Tensor, temperature_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draft tokens and their distribution, as vLLM's probabilistic proposer makes them of a drafter's logits."""
    from vllm.v1.spec_decode.llm_base_proposer import compute_probs_and_sample_next_token

    compat.install_cpu_kernels()
    num_requests, num_drafts, vocabulary = logits_BKV.shape
    temperature_N = temperature_B.repeat_interleave(num_drafts)
    ids_N, probs_NV = compute_probs_and_sample_next_token(
        logits_BKV.reshape(-1, vocabulary).clone(), _sampling_metadata(temperature_N)
    )
    return ids_N.view(num_requests, num_drafts), probs_NV.view(num_requests, num_drafts, vocabulary)


def _sampling_metadata(temperature_B: torch.Tensor) -> SamplingMetadata:
    """Temperature and nothing else: no truncation, no penalties."""
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    nothing = torch.empty(0)
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


# Keys of vLLM's speculative_config (and of its forks) that trade the policy's distribution for acceptance.
_LOSSY_KEYS = (
    "synthetic_acceptance_rates",
    "synthetic_acceptance_length",
    "posterior_threshold",
    "posterior_alpha",
    "typical_acceptance_sampler_posterior_threshold",
    "typical_acceptance_sampler_posterior_alpha",
)
_LOSSLESS_METHODS = ("standard", "block")  # block verification (Sun et al. 2024) keeps the distribution as well


def refuse_lossy(speculative_config: Mapping[str, Any]) -> None:
    """Raise when vLLM's speculative_config asks for anything but the policy's distribution. Training calls it; bench does not."""
    method = speculative_config.get("rejection_sample_method", "standard")
    if method not in _LOSSLESS_METHODS:
        raise ValueError(
            f"speculative_config.rejection_sample_method: got {method!r}; must be one of {', '.join(_LOSSLESS_METHODS)} because "
            "the policy would be trained on tokens that it did not draw"
        )
    acceptance = speculative_config.get("acceptance_method", "rejection_sampler")
    if acceptance != "rejection_sampler":
        raise ValueError(
            f"speculative_config.acceptance_method: got {acceptance!r}; must be 'rejection_sampler' because lenient acceptance "
            "changes the distribution"
        )
    for key in _LOSSY_KEYS:
        if speculative_config.get(key) is not None:
            raise ValueError(
                f"speculative_config.{key}: got {speculative_config[key]!r}; must be left out because acceptance that does not "
                "follow from the policy's probabilities changes the distribution"
            )
