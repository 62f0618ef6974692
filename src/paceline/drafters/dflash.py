"""DFlash: a drafter that guesses all tokens in one pass.

DFlash (https://arxiv.org/abs/2602.06036) reads the policy's hidden states as context and fills in masked slots after
it. For the anchor t of packing.py, a block of slots occupies the next positions, and each slot guesses its own token:

    context       fc(taps)         positions 0..t        keys and values only
    slot 0        token x_{t+1}    position t + 1        known already
    slot j + 1    mask token       position t + 2 + j    out: q_j = guess of p(x_{t+2+j} | ...)

Seven tokens take one pass instead of EAGLE-3's seven. In return, slots do not know each other's tokens: q_j is at best
the policy's average over all tokens between, and acceptance falls with j.

A slot sees the context of its anchor, itself and earlier slots. q_j therefore does not depend on the draft length,
which the selector changes from step to step. `sliding_window_non_causal: false` configures this in vLLM, for full
attention too. speculators applies the setting to sliding windows only: its trainer would let slots see the whole block.

Dimension suffixes as in packing.py, and B slots of a block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedConfig, Qwen3Config

from paceline.drafters.checkpoint import attention_name, layer_settings, speculators_config
from paceline.drafters.loss import Guesses, score_guesses
from paceline.drafters.packing import Block, Pack, attend_blocks

if TYPE_CHECKING:
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig

NUM_LAYERS = 2
"""The second layer lets a slot use the results of earlier slots. It raises the accepted length on arena:small from 2.7
to 3.0 after 100,000 training tokens."""


def make_config(
    policy: PreTrainedConfig, *, taps: Sequence[int], policy_path: Path, draft_length: int
) -> DFlashSpeculatorConfig:
    """Return the config of a drafter with a few layers of the policy's shape."""
    from speculators.models.dflash import DFlashSpeculatorConfig

    return DFlashSpeculatorConfig(
        transformer_layer_config=Qwen3Config(num_hidden_layers=NUM_LAYERS, **layer_settings(policy)),
        draft_vocab_size=policy.vocab_size,
        block_size=draft_length + 1,
        aux_hidden_state_layer_ids=list(taps),
        mask_token_id=_mask_token(policy),
        sliding_window_non_causal=False,
        target_hidden_size=policy.hidden_size,
        speculators_config=speculators_config("dflash", policy, policy_path, draft_length),
    )


def _mask_token(policy: PreTrainedConfig) -> int:
    """Return the end-of-sequence token, which is free as a mask because nothing is drafted after it.

    Without one, return the last token of the vocabulary, usually padding.
    """
    end = policy.eos_token_id
    if end is None:
        return policy.vocab_size - 1
    return end if isinstance(end, int) else end[0]


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    blocks: Sequence[Block],
    *,
    scaling: float,
    **unused: object,
) -> tuple[torch.Tensor, None]:
    """Compute the attention described above, as one of transformers' attention functions.

    `key` holds the context, then the slots. The slots of an anchor see the same context, so `attend_blocks` treats them
    as additional queries that share its keys."""
    del module, unused
    num_anchors = sum(len(block.kept_A) for block in blocks)
    num_slots = query.shape[2] // num_anchors
    num_context = key.shape[2] - query.shape[2]
    context_key_NHE, context_value_NHE = (x[0, :, :num_context].transpose(0, 1) for x in (key, value))
    key_AHBE, value_AHBE = (
        x[0, :, num_context:].unflatten(1, (num_anchors, num_slots)).transpose(0, 1) for x in (key, value)
    )
    query_HGABE = (query[0] * scaling).unflatten(1, (num_anchors, num_slots)).unflatten(0, (key.shape[1], -1))
    query_AHGE = query_HGABE.permute(2, 0, 1, 3, 4).flatten(2, 3)
    later_BB = torch.ones(num_slots, num_slots, dtype=torch.bool, device=key.device).triu(1)
    later_GB = later_BB.repeat(query_AHGE.shape[2] // num_slots, 1)
    score_AHGB = (query_AHGE @ key_AHBE.mT).float().masked_fill(later_GB, -math.inf)
    out_AHGE, share_AHGB = attend_blocks(query_AHGE, context_key_NHE, context_value_NHE, score_AHGB, blocks)
    assert share_AHGB is not None
    out_AHGE = out_AHGE + share_AHGB @ value_AHBE
    # [A, H, G * B, E] -> [A, B, H * G, E]
    out_ABHE = out_AHGE.unflatten(2, (-1, num_slots)).permute(0, 3, 1, 2, 4).flatten(2, 3)
    return out_ABHE.flatten(0, 1)[None], None


AttentionInterface.register(attention_name("dflash"), cast("Any", _attend))


def guess(
    drafter: DFlashDraftModel, pack: Pack, head_VD: torch.Tensor, num_steps: int, *, overlap_share: float = 0.0
) -> Guesses:
    """Fill in `num_steps` slots after every anchor. `head_VD` is the policy's output head."""
    context_NH = drafter.hidden_norm(drafter.fc(pack.taps_NKD.flatten(1)))
    slot_B = torch.arange(num_steps + 1, device=pack.anchor_A.device)
    token_AB = torch.where(slot_B == 0, pack.token_N[pack.anchor_A][:, None], drafter.mask_token_id)
    position_AB = pack.position_N[pack.anchor_A][:, None] + 1 + slot_B
    hidden = drafter.embed_tokens(token_AB.flatten())[None]
    rope = drafter.rotary_emb(hidden, torch.cat([pack.position_N, position_AB.flatten()])[None])
    for layer in drafter.layers:
        hidden = layer(
            target_hidden=context_NH[None],
            hidden_states=hidden,
            attention_mask=cast("Any", pack.anchored),
            position_embeddings=rope,
        )
    normed_ABH = drafter.norm(hidden[0]).unflatten(0, token_AB.shape)
    return score_guesses(drafter, pack, list(normed_ABH[:, 1:].unbind(1)), head_VD, overlap_share=overlap_share)
