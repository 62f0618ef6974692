"""EAGLE-3: an autoregressive drafter, and its unrolled training ("training-time test").

EAGLE-3 (https://arxiv.org/abs/2503.01840) is one decoder layer that reads the policy's own hidden states ("taps"):

    step 0   in: fc(taps at t),               token x_{t+1}   position t       out: q_0 = guess of p(x_{t+2} | ...)
    step j   in: own output of step j - 1,    token x_{t+1+j} position t + j   out: q_j = guess of p(x_{t+2+j} | ...)

In the first step every position has taps. Later positions have none because the policy has not computed them, so the
drafter reads its own output, and training unrolls all steps. An anchor t sees in step j the step-0 keys of positions up
to t and its own chain of steps 1..j. As a mask over the keys of steps 0, 1, 2 of a document with four positions:

             step 0     step 1     step 2
    t = 0    x . . .    x . . .    x . . .
    t = 1    x x . .    . x . .    . x . .
    t = 2    x x x .    . . x .    . . x .
    t = 3    x x x x    . . . x    . . . x

Diagonals are computed as dot products, not as a square matrix. Tests compare the result with speculators' forward pass,
which uses a dense mask. Dimension suffixes as in packing.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from transformers import AttentionInterface, LlamaConfig, PreTrainedConfig

from paceline.drafters.checkpoint import EAGLE3_TAPS, attention_name, layer_settings, speculators_config
from paceline.drafters.loss import Guesses, score_guesses
from paceline.drafters.packing import Block, Pack, attend_blocks

if TYPE_CHECKING:
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig


def make_config(
    policy: PreTrainedConfig, *, taps: Sequence[int], policy_path: Path, draft_length: int
) -> Eagle3SpeculatorConfig:
    """Return the config of a drafter with one layer of the policy's shape."""
    from speculators.models.eagle3 import Eagle3SpeculatorConfig

    if len(taps) != EAGLE3_TAPS:
        raise ValueError(
            f"taps: got {list(taps)}; must be {EAGLE3_TAPS} because vLLM passes that many to an EAGLE-3 drafter"
        )
    return Eagle3SpeculatorConfig(
        transformer_layer_config=LlamaConfig(num_hidden_layers=1, **layer_settings(policy)),
        draft_vocab_size=policy.vocab_size,
        norm_before_residual=True,
        embed_requires_grad=True,
        eagle_aux_hidden_state_layer_ids=list(taps),
        target_hidden_size=policy.hidden_size,
        speculators_config=speculators_config("eagle3", policy, policy_path, draft_length),
    )


class _Chain:
    """Keys and values of all steps so far, in the role of transformers' cache."""

    def __init__(self) -> None:
        self._layers: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        keys, values = self._layers.setdefault(layer, ([], []))
        # [1, heads, tokens, E] -> [tokens, heads, E]
        keys.append(key[0].transpose(0, 1))
        values.append(value[0].transpose(0, 1))
        return keys, values


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    blocks: Sequence[Block],
    *,
    scaling: float,
    **unused: object,
) -> tuple[torch.Tensor, None]:
    """Compute the masked attention above, as one of transformers' attention functions."""
    del module, unused
    query_AHGE = (query[0].transpose(0, 1) * scaling).unflatten(1, (keys[0].shape[1], -1))
    scores = [(query_AHGE * key[:, :, None]).sum(-1) for key in keys[1:]]
    score_AHGJ = torch.stack(scores, -1) if scores else None
    out_AHGE, share_AHGJ = attend_blocks(query_AHGE, keys[0], values[0], score_AHGJ, blocks)
    if share_AHGJ is not None:
        for j, value in enumerate(values[1:]):
            out_AHGE = out_AHGE + share_AHGJ[..., j, None] * value[:, :, None]
    return out_AHGE.flatten(1, 2)[None], None


AttentionInterface.register(attention_name("eagle3"), cast("Any", _attend))


def guess(
    drafter: Eagle3DraftModel, pack: Pack, head_VD: torch.Tensor, num_steps: int, *, overlap_share: float = 0.0
) -> Guesses:
    """Unroll `num_steps` steps from every anchor. `head_VD` is the policy's output head."""
    chain = cast("Any", _Chain())
    hidden_NH = _combine(drafter, pack.taps_NKD.flatten(1))
    token_N, position_N, blocks = pack.token_N, pack.position_N, pack.everywhere
    normed: list[torch.Tensor] = []
    for step in range(num_steps):
        inputs = torch.cat([drafter.embed_tokens(token_N), hidden_NH.to(drafter.embed_tokens.weight.dtype)], -1)[None]
        rope = drafter.rotary_emb(inputs, position_N[None])
        hidden = inputs
        for layer in drafter.layers:
            hidden = layer(hidden, attention_mask=blocks, past_key_values=chain, position_embeddings=rope)
        hidden_NH = hidden[0]
        if step == 0:
            hidden_NH, blocks = hidden_NH[pack.anchor_A], pack.anchored
        normed.append(drafter.norm(hidden_NH))
        if drafter.config.norm_output:
            hidden_NH = normed[-1]
        next_A = (pack.anchor_A + step + 1).clamp(max=len(pack.token_N) - 1)
        token_N, position_N = pack.token_N[next_A], pack.position_N[pack.anchor_A] + step + 1
    return score_guesses(drafter, pack, normed, head_VD, overlap_share=overlap_share)


def _combine(drafter: Eagle3DraftModel, taps_NC: torch.Tensor) -> torch.Tensor:
    """Project the policy's hidden states to the drafter's input, as vLLM's `combine_hidden_states` does."""
    if drafter.input_norm is not None:
        taps_NC = drafter.input_norm(taps_NC)
    if drafter.fc_norm is not None:
        chunks = taps_NC.chunk(len(drafter.fc_norm), -1)
        taps_NC = torch.cat([norm(chunk) for norm, chunk in zip(drafter.fc_norm, chunks, strict=True)], -1)
    return drafter.fc(taps_NC)
