"""Inputs of the bench `training`: documents as long as the arena's, and losses that show whether a mask is missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import training
from drafter_cases import policy_config
from paceline.drafters.packing import Document, Pack, make_pack
from paceline.drafters.trainer import Schedule, trained

POLICY = policy_config(vocab_size=128)
POLICY.eos_token_id = 1
SCHEDULE = Schedule(num_steps=None, tokens_per_step=512, pass_tokens=512, draft_length=3)


def test_documents_are_as_long_as_the_arenas() -> None:
    """At another mix of lengths the speed-up is another one: long documents gain little from packing."""
    documents = training.arena_documents(POLICY, 200, seed=0)
    responses = [len(document.token_ids) - document.num_prompt_tokens for document in documents]
    assert 45 <= np.median(responses) <= 95 and max(responses) > 300
    assert all(document.num_anchors and document.token_ids[-1] == POLICY.eos_token_id for document in documents)


def test_a_pack_in_which_documents_see_one_another_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = training.arena_documents(POLICY, 8, seed=0)
    trainer = training._trainer("eagle3", POLICY, SCHEDULE, seed=0)
    head_VD = training._policy_head(POLICY, 0)
    for _ in range(3):
        training._train(trainer, documents)
    assert max(training.loss_differences(trainer, head_VD, documents)) <= 1e-5

    def without_mask(part: Sequence[Document], device: torch.device) -> Pack:
        pack = make_pack(part, device)
        num_positions = len(pack.token_N)
        one_document = Document(
            token_ids=np.zeros(num_positions + 2, np.int32),
            num_prompt_tokens=1,
            taps=np.zeros((num_positions + 2, 3, 1), np.float32),
            last=np.zeros((num_positions + 2, 1), np.float32),
        )
        everything = make_pack([one_document], device).everywhere
        return replace(pack, everywhere=everything)

    monkeypatch.setattr(training, "make_pack", without_mask)
    assert max(training.loss_differences(trainer, head_VD, documents)) > 1e-4


def test_a_full_checkpoint_holds_optimizer_and_frozen_tensors_too(tmp_path: Path) -> None:
    """Were the full one not full, the selective one would be compared with itself."""
    trainer = training._trainer("eagle3", POLICY, SCHEDULE, seed=0)
    training._train(trainer, training.arena_documents(POLICY, 4, seed=0))
    state = training._whole_state(trainer)
    num_trained = sum(weight.numel() for weight in trained(trainer.drafter).values())
    assert sum(weight.numel() for weight in state.values()) > 2 * num_trained
    assert {name.split("/")[0] for name in state} >= {"drafter", "optimizer", "frozen"}
    training.write(tmp_path / "full.safetensors", state, step=1)
