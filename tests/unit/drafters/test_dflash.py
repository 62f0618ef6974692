"""DFlash against speculators' own forward pass, and what its draft length must not change."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from speculators.models.attention import create_float_mask
from speculators.models.dflash import DFlashDraftModel
from transformers import Qwen3Config

from drafter_cases import guessed_logits, make_documents, make_drafter, policy_config
from paceline.drafters import packing
from paceline.drafters.dflash import make_config
from paceline.drafters.packing import Document

STEPS = 5


def speculators_logits(drafter: Any, documents: list[Document]) -> torch.Tensor:
    """The slow twin: speculators' forward pass with its dense mask, [anchors, slots, vocabulary]. A window wider than
    any document keeps its slots from seeing later ones."""
    config = copy.deepcopy(drafter.config)
    config.block_size = STEPS + 1
    layer = config.transformer_layer_config
    layer._attn_implementation = "eager"
    layer.layer_types, layer.sliding_window = ["sliding_attention"] * layer.num_hidden_layers, 10_000
    twin = DFlashDraftModel(config).float()
    twin._create_mask_fn = partial(create_float_mask, dtype=torch.float32)
    twin.load_state_dict(drafter.state_dict())
    # It takes no anchors among the last tokens of a pack: a document of nothing goes there.
    (padding,) = make_documents([(config.block_size, 0)])
    columns: list[list[np.ndarray]] = [[], [], [], [], []]
    for index, document in enumerate([*documents, padding]):
        position = np.arange(len(document.token_ids))
        is_anchor = (position >= document.num_prompt_tokens) & (position < len(position) - 1)
        row = (
            document.taps.reshape(len(position), -1),
            document.token_ids,
            is_anchor,
            np.full(len(position), index),
            position,
        )
        for column, values in zip(columns, row, strict=True):
            column.append(values)
    taps, tokens, anchors, ids, positions = (torch.from_numpy(np.concatenate(column))[None] for column in columns)
    with torch.no_grad():
        _, logits, *_ = twin._backbone_forward(
            hidden_states=taps,
            input_ids=tokens.long(),
            loss_mask=anchors.float(),
            verifier_last_hidden_states=taps[..., : layer.hidden_size],
            document_ids=ids,
            position_ids=positions,
            max_anchors=int(anchors.sum()),
        )
    return logits[0].unflatten(0, (-1, config.block_size))


@pytest.mark.parametrize("block_scores", [1 << 20, 40, 1])
def test_every_slot_equals_speculators_forward_pass(block_scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A context that reaches one position too far shows the drafter the answer: it would learn to copy, and fail in the
    engine."""
    monkeypatch.setattr(packing, "_BLOCK_SCORES", block_scores)
    documents = make_documents([(3, 9), (1, 4), (6, 2), (2, 13)])
    drafter = make_drafter("dflash")
    expected_ABV = speculators_logits(drafter, documents)
    got_AJV = torch.stack(guessed_logits(drafter, documents, STEPS), 1)
    torch.testing.assert_close(got_AJV, expected_ABV[:, 1:], rtol=1e-4, atol=1e-4)


def test_a_guess_does_not_depend_on_the_draft_length() -> None:
    """The selector changes it from step to step: slots that see later ones would be at home in one length only."""
    documents = make_documents([(3, 9), (1, 4)])
    drafter = make_drafter("dflash")
    long, short = (torch.stack(guessed_logits(drafter, documents, steps)) for steps in (7, 2))
    torch.testing.assert_close(short, long[:2])


@pytest.mark.parametrize(("end", "mask"), [(7, 7), ([9, 7], 9), (None, 23)])
def test_the_mask_is_a_token_that_nothing_is_drafted_behind(end: int | list[int] | None, mask: int) -> None:
    """A mask that also occurs as the last token before a draft would mean two things to the drafter."""
    policy: Qwen3Config = policy_config()
    policy.eos_token_id = end
    assert make_config(policy, taps=(1, 3), policy_path=Path("policy"), draft_length=7).mask_token_id == mask
