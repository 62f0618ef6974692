"""Forward pass that scores response tokens and can record hidden states.

Logits are computed only for response tokens, in chunks, so the chunk bounds the memory, not the batch.

Dimension suffixes: B rollouts, S padded tokens (prompt and response), T padded response tokens, N response tokens
without padding, D hidden size, V vocabulary, K taps.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch and transformers are partially typed.

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from paceline.learner.checkpoint import output_head
from paceline.types import Floats, PendingGradients, Sample

_CHUNK_ELEMENTS = 1 << 26
"""Logits per chunk, 256 MB in float32. Eight thousand tokens with a vocabulary of 150,000 would need 5 GB."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HiddenStates:
    """Hidden states of one sample, prompt included; float32."""

    taps: Floats
    """[tokens, taps, hidden]: the residual stream after i decoder layers for each tap i, vLLM's numbering of auxiliary
    hidden states; 0 is the input of the first layer."""
    last: Floats
    """[tokens, hidden]: after the final norm, the input of the output head."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankScores:
    """Scores of samples in their order, the same on every rank; hidden states stay on the rank that computed them."""

    logp: tuple[Floats, ...]
    """Log-probability of each response token, at the rollout temperature."""
    entropy: tuple[Floats, ...]
    states: Mapping[int, HiddenStates]
    """Hidden states by sample index; empty without taps. Each requested sample is on exactly one rank."""
    pending: PendingGradients | None = None


class TokenScorer(nn.Module):
    """The policy with a forward pass that scores only chosen tokens: prompt tokens skip the output head. It is FSDP2's
    root module, because FSDP2 gathers the root's parameters only in the root's forward pass."""

    def __init__(self, policy: PreTrainedModel, temperature: float) -> None:
        super().__init__()
        self.policy = policy
        self.temperature = temperature
        self.chunk_tokens = max(1, _CHUNK_ELEMENTS // policy.config.get_text_config().vocab_size)

    def forward(
        self, input_ids_BS: torch.Tensor, position_N: torch.Tensor, target_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return differentiable logp_N, and detached entropy_N and hidden_BSD after the final norm."""
        hidden_BSD = self.policy.base_model(input_ids=input_ids_BS, use_cache=False).last_hidden_state
        hidden_ND = hidden_BSD.flatten(0, 1).index_select(0, position_N)
        if len(position_N) <= self.chunk_tokens:
            logp_N, entropy_N = self.score(hidden_ND, target_N)
        else:
            parts = [
                checkpoint(self.score, *chunk, use_reentrant=False, preserve_rng_state=False)
                for chunk in zip(hidden_ND.split(self.chunk_tokens), target_N.split(self.chunk_tokens), strict=True)
            ]
            logp_N, entropy_N = (torch.cat(column) for column in zip(*parts, strict=True))
        return logp_N, entropy_N, hidden_BSD.detach()

    def score(self, hidden_ND: torch.Tensor, target_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # Always float32: the error of a bfloat16 logsumexp exceeds the whole mismatch to the engine.
        logits_NV = output_head(self.policy)(hidden_ND).float() / self.temperature
        logsumexp_N = logits_NV.logsumexp(-1)
        logp_N = logits_NV.gather(-1, target_N[:, None])[:, 0] - logsumexp_N
        with torch.no_grad():
            entropy_N = logsumexp_N - (logits_NV.softmax(-1) * logits_NV).sum(-1)
        return logp_N, entropy_N


@contextmanager
def record_taps(layers: Sequence[nn.Module], taps: Sequence[int]) -> Generator[dict[int, torch.Tensor]]:
    """Record the outputs of the tapped layers, and the first layer's input for tap 0, during a forward pass. The last
    of transformers' own hidden states would be the normed output instead of the last layer's."""
    recorded: dict[int, torch.Tensor] = {}

    def keep(tap: int) -> Callable[[nn.Module, Any, Any], None]:
        return lambda _module, _inputs, output: recorded.update({tap: output.detach()})

    handles = [layers[tap - 1].register_forward_hook(keep(tap)) for tap in set(taps) if tap]
    if 0 in taps:
        handles.append(
            layers[0].register_forward_pre_hook(lambda _module, inputs: recorded.update({0: inputs[0].detach()}))
        )
    try:
        yield recorded
    finally:
        for handle in handles:
            handle.remove()


def hidden_states_of(
    samples: Sequence[Sample],
    indices: tuple[int, ...],
    rows: Sequence[int],
    tapped: Sequence[torch.Tensor],
    last_BSD: torch.Tensor,
) -> dict[int, HiddenStates]:
    """Copy the hidden states of some rows of a pass into host memory, without padding."""
    states: dict[int, HiddenStates] = {}
    for row in rows:
        length = len(samples[indices[row]].token_ids)
        taps_SKD = torch.stack([tap_BSD[row, :length] for tap_BSD in tapped], 1)
        states[indices[row]] = HiddenStates(
            taps=taps_SKD.to("cpu", torch.float32).numpy(),
            # A view would keep the whole pass in memory.
            last=last_BSD[row, :length].to("cpu", torch.float32, copy=True).numpy(),
        )
    return states


def unflatten(value_N: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Put response tokens back into their padded rows; padding is zero."""
    return torch.zeros(mask_BT.shape, device=value_N.device).masked_scatter(mask_BT, value_N)
