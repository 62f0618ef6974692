"""Verification of drafts by coupling on vLLM's V2 runner.

V2 draws tokens by Gumbel's trick with noise of (request's seed, position), so a seeded request in plain decoding gets
the same tokens in any batch. Its rejection sampler uses other noise, and then tokens depend on the drafts. Here a token
is always the draw of plain decoding, and a draft is accepted if it equals that draw. vLLM salts the drafter's noise,
because its verification needs independent noise; here the drafter draws with the policy's noise, so that drafts agree
with the policy's draws as often as they can.

Relied upon, in vllm/v1/worker/gpu:
  spec_decode/rejection_sampler.py      rejection_sample, a global that RejectionSampler._verify looks up at each call
  sample/gumbel.py                      gumbel_sample: noise of (seed, position), salted if `is_drafting`
  spec_decode/speculator.py, spec_decode/dspark/speculator.py    gumbel_sample, a global that draws drafts

CUDA graphs capture the drafter's draw, so `couple` is called before the runner is built. Goes when vLLM has such a
`rejection_sample_method`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

# Dimensions: B requests, N rows of logits, V vocabulary, L = most drafts + 1.


def couple() -> None:
    """Verify by coupling, with drafts drawn by the policy's noise."""
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler, speculator
    from vllm.v1.worker.gpu.spec_decode.dspark import speculator as dspark_speculator

    setattr(rejection_sampler, "rejection_sample", verify)  # noqa: B010  pyright: modules export no such name

    @functools.wraps(gumbel_sample)
    def with_the_policys_noise(*args: Any, **kwargs: Any) -> torch.Tensor:
        return gumbel_sample(*args, **kwargs | {"is_drafting": False})

    for module in (speculator, dspark_speculator):
        setattr(module, "gumbel_sample", with_the_policys_noise)  # noqa: B010


def verify(
    target_logits: torch.Tensor,
    draft_logits: torch.Tensor | None,
    draft_sampled: torch.Tensor,
    cu_num_logits: torch.Tensor,
    pos: torch.Tensor,
    idx_mapping: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    num_speculative_steps: int,
    *_: object,
    use_fp64: bool = False,
    **settings: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace `rejection_sample`: return the policy's draws and how many of each request count.

    Row i of a request is the policy's distribution after draft i, and `draft_sampled` holds draft i + 1 in row i + 1,
    -1 for none. No value is copied to the host."""
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    num_rows, num_requests = len(target_logits), len(cu_num_logits) - 1
    own_N = gumbel_sample(
        target_logits,
        expanded_idx_mapping,
        temperature,
        seed,
        pos,
        apply_temperature=False,
        is_drafting=False,
        use_fp64=use_fp64,
    )
    request_N = torch.arange(num_requests, device=own_N.device).repeat_interleave(
        cu_num_logits.diff(), output_size=num_rows
    )
    place_N = expanded_local_pos.long()
    own_BL = own_N.new_zeros(num_requests, num_speculative_steps + 1)
    own_BL[request_N, place_N] = own_N
    agrees_BL = torch.zeros_like(own_BL, dtype=torch.int32)
    # Each row's draft stands in the next row. A request's first row has none, and the last row of all precedes nothing.
    follows_N = place_N[1:] > 0
    agrees_BL[request_N[:-1], place_N[:-1]] = (follows_N & (draft_sampled[1:] == own_N[:-1])).int()
    return own_BL, (agrees_BL.cumprod(1).sum(1) + 1).int()
