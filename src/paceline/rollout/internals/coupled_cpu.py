"""Noise of (request's seed, token's index) in vLLM's CPU sampler, and verification of drafts by coupling.

vLLM's V1 sampler draws by Gumbel's trick: a token is the argmax of logits plus noise, and on CPUs the noise of a row
follows from one seed per row, which a generator per request supplies. The generator's state depends on how often it was
asked, so tokens depend on drafts. Here the seed of a row is a hash of the request's seed and the index of the token to
come, wherever the token is drawn: in plain decoding, in verification and by the drafter.

    draft at index i      argmax(drafter's logits + noise(seed, i))
    token at index i      argmax(policy's logits + noise(seed, i)), accepted drafts are those that equal it

So a token is the same with and without drafts, and a drafter with the policy's distribution would draft exactly the
policy's tokens. Requests without a seed get random ones at every draw.

Relied upon:
  vllm/v1/sample/ops/topk_topp_sampler.py    TopKTopPSampler.forward_cpu; torch.ops._C.fused_gumbel_argmax, since 0.32
  vllm/v1/worker/gpu_model_runner.py         GPUModelRunner._sample; input_batch.num_tokens_no_spec, the tokens that a
                                             request has
  vllm/v1/sample/rejection_sampler.py        rejection_sample, a global that RejectionSampler.forward looks up
  vllm/v1/spec_decode/llm_base_proposer.py   SpecDecodeBaseProposer: propose (common_attn_metadata.seq_lens,
                                             num_rejected_tokens_gpu), _sample_from_logits, whose second result goes to
                                             rejection_sample as `draft_probs`
  vllm/v1/sample/metadata.py                 SamplingMetadata.generators by row

Goes when vLLM's CPU backend runs on V2, or draws by request seed and position on V1 (vLLM issue 59786 changed its noise
last).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

# Dimensions: B requests, N rows of logits, V vocabulary, L tokens of a verification.
Indices = npt.NDArray[np.int64]
_MARK = "_paceline_keyed"
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(slots=True)
class _SampledBatch:
    """The batch that this process is sampling, one at a time."""

    known_B: Indices = field(default_factory=lambda: np.empty(0, np.int64))
    """Tokens of each request before the step: the index of the first token to come."""
    last_B: Indices = field(default_factory=lambda: np.empty(0, np.int64))
    """Index of the token that follows all drafts."""
    first_draft_B: Indices = field(default_factory=lambda: np.empty(0, np.int64))
    """Index of the first token that the drafter draws."""
    num_drafted: int = 0
    """Tokens that the drafter has drawn for each request."""


_batch = _SampledBatch()


def key_noise() -> bool:
    """Draw tokens with noise of (seed, index); return whether this vLLM can. Called before the sampler is built."""
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if not hasattr(torch.ops._C, "fused_gumbel_argmax"):
        return False
    stock_sample = GPUModelRunner._sample
    if hasattr(stock_sample, _MARK):
        return True
    stock_forward = TopKTopPSampler.forward_cpu

    @functools.wraps(stock_sample)
    def sample(self: Any, logits: torch.Tensor | None, spec_decode_metadata: SpecDecodeMetadata | None) -> Any:
        num_drafts = 0 if spec_decode_metadata is None else np.asarray(spec_decode_metadata.num_draft_tokens)
        _batch.known_B = self.input_batch.num_tokens_no_spec[: self.input_batch.num_reqs].astype(np.int64)
        _batch.last_B = _batch.known_B + num_drafts
        return stock_sample(self, logits, spec_decode_metadata)

    @functools.wraps(stock_forward)
    def forward_cpu(
        self: Any,
        logits: torch.Tensor,
        generators: dict[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

        if len(logits) != len(_batch.last_B):  # a pass without requests, to warm up
            return stock_forward(self, logits, generators, k, p)
        logits = apply_top_k_top_p(logits, k, p)
        returned = {
            "processed_logits": lambda: logits,
            "processed_logprobs": lambda: logits.log_softmax(dim=-1, dtype=torch.float32),
        }.get(self.logprobs_mode, lambda: None)()
        return draw(logits, generators, np.arange(len(logits)), _batch.last_B), returned

    setattr(sample, _MARK, True)
    GPUModelRunner._sample = sample
    TopKTopPSampler.forward_cpu = forward_cpu
    return True


def couple() -> None:
    """Verify by coupling, with drafts drawn by the same noise. Called before the drafter drafts."""
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    stock_propose = SpecDecodeBaseProposer.propose
    if hasattr(stock_propose, _MARK):
        return

    @functools.wraps(stock_propose)
    def propose(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        # With rejected drafts or without: the step's last token, whose index follows all that was computed.
        length_B = kwargs["common_attn_metadata"].seq_lens.numpy().astype(np.int64)
        rejected_B = kwargs["num_rejected_tokens_gpu"]
        _batch.first_draft_B = length_B + 1 - (0 if rejected_B is None else rejected_B.numpy())
        _batch.num_drafted = 0
        return stock_propose(self, *args, **kwargs)

    setattr(propose, _MARK, True)
    SpecDecodeBaseProposer.propose = propose
    SpecDecodeBaseProposer._sample_from_logits = _sample_drafts
    setattr(rejection_sampler, "rejection_sample", _verify)  # noqa: B010  pyright: modules export no such name


def draw(
    logits_NV: torch.Tensor, generators: Mapping[int, torch.Generator], row_N: Indices, index_N: Indices
) -> torch.Tensor:
    """Return the token that each row of logits draws: for the request in `row_N`, at `index_N` among its tokens."""
    # Unsigned, as generators report negative seeds.
    seed_B = torch.randint(2**62, (int(row_N.max(initial=0)) + 1,)).numpy().astype(np.uint64)
    for row, generator in generators.items():
        if row < len(seed_B):
            seed_B[row] = generator.initial_seed()
    seed_N = noise_seeds(seed_B[row_N], index_N)
    return torch.ops._C.fused_gumbel_argmax(logits_NV.float(), torch.from_numpy(seed_N))


def noise_seeds(seed_N: npt.NDArray[np.uint64], index_N: Indices) -> Indices:
    """Return the seed of each row's noise: SplitMix64's number `index` in the sequence that the hashed seed begins."""
    start_N = _mixed(seed_N + _GOLDEN)
    return _mixed(start_N + index_N.astype(np.uint64) * _GOLDEN).view(np.int64)


def _mixed(x_N: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x_N = (x_N ^ (x_N >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x_N = (x_N ^ (x_N >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x_N ^ (x_N >> np.uint64(31))


def _or_greedy(
    drawn_N: torch.Tensor, logits_NV: torch.Tensor, temperature_N: torch.Tensor, metadata: SamplingMetadata
) -> torch.Tensor:
    return drawn_N if metadata.all_random else torch.where(temperature_N == 0, logits_NV.argmax(-1), drawn_N)


def _sample_drafts(
    self: Any, logits: torch.Tensor, sampling_metadata: SamplingMetadata
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Draw drafts with the policy's noise; return them with the logits after temperature, in place of probabilities,
    which coupling does not need."""
    if not self._enable_probabilistic_draft_probs or sampling_metadata.all_greedy:
        return logits.argmax(dim=-1), None
    assert sampling_metadata.temperature is not None
    first_B = _batch.first_draft_B
    # Parallel drafters draw all drafts of a request at once, others one at a time.
    num_each = len(logits) // len(first_B)
    row_N = np.repeat(np.arange(len(first_B)), num_each)
    index_N = first_B[row_N] + _batch.num_drafted + np.tile(np.arange(num_each), len(first_B))
    _batch.num_drafted += num_each
    temperature_N = sampling_metadata.temperature[torch.from_numpy(row_N)]
    logits = logits / temperature_N.where(temperature_N != 0, 1.0)[:, None]
    drawn_N = draw(logits, sampling_metadata.generators, row_N, index_N)
    return _or_greedy(drawn_N, logits, temperature_N, sampling_metadata), logits


def _verify(
    draft_token_ids: torch.Tensor,
    num_draft_tokens: list[int],
    max_spec_len: int,
    cu_num_draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_logits: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    sampling_metadata: SamplingMetadata,
    **settings: object,
) -> torch.Tensor:
    """Replace `rejection_sample`: return the policy's draws up to the first that is not the draft, -1 after it."""
    count_B = np.asarray(num_draft_tokens)
    row_N = np.repeat(np.arange(len(count_B)), count_B)
    place_N = np.arange(len(row_N)) - np.repeat(count_B.cumsum() - count_B, count_B)
    if sampling_metadata.all_greedy:
        own_N = target_logits.argmax(-1)
    else:
        assert sampling_metadata.temperature is not None
        own_N = draw(target_logits, sampling_metadata.generators, row_N, _batch.known_B[row_N] + place_N)
        temperature_N = sampling_metadata.temperature[torch.from_numpy(row_N)]
        own_N = _or_greedy(own_N, target_logits, temperature_N, sampling_metadata)
    tokens_BL = torch.full((len(count_B), max_spec_len + 1), -1, dtype=torch.int32)
    agrees_BL = torch.zeros_like(tokens_BL)
    tokens_BL[row_N, place_N] = own_N.int()
    tokens_BL[np.arange(len(count_B)), count_B] = bonus_token_ids[:, 0].int()
    agrees_BL[row_N, place_N] = (own_N == draft_token_ids).int()
    num_accepted_B1 = agrees_BL.cumprod(1).sum(1, keepdim=True)
    return tokens_BL.masked_fill_(torch.arange(max_spec_len + 1) > num_accepted_B1, -1)
