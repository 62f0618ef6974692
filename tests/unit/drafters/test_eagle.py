"""EAGLE-3 against speculators' own forward pass, and the judgment of guesses."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from speculators.models.eagle3 import Eagle3DraftModel

from drafter_cases import VOCABULARY, guessed_logits, make_documents, make_drafter, make_head, recorded_logits
from paceline.drafters import loss, packing
from paceline.drafters.kinds import guess
from paceline.drafters.packing import Document, make_pack

CPU = torch.device("cpu")
STEPS = 5


def speculators_forward(drafter: Any, documents: list[Document]) -> list[torch.Tensor]:
    """The slow twin: speculators' forward pass, with its dense mask over all documents and steps."""
    config = copy.deepcopy(drafter.config)
    config.transformer_layer_config._attn_implementation = "eager"
    twin = Eagle3DraftModel(config).float()
    twin.load_state_dict(drafter.state_dict())
    lengths = [len(document.token_ids) - 1 for document in documents]
    parts = [
        (d.taps[:n].reshape(n, -1), d.token_ids[1:], np.full(n, i), np.arange(n))
        for i, (d, n) in enumerate(zip(documents, lengths, strict=True))
    ]
    taps, tokens, ids, positions = (
        torch.from_numpy(np.concatenate(column))[None] for column in zip(*parts, strict=True)
    )
    with recorded_logits(twin) as logits, torch.no_grad():
        twin(taps, tokens.long(), ids, position_ids=positions, ttt_steps=STEPS)
    return logits


def anchors_of(documents: list[Document]) -> Iterator[tuple[int, int, int]]:
    """Row among the anchors, row among all positions but the last of each document, and steps that the document can
    judge."""
    start = row = 0
    for document in documents:
        last = len(document.token_ids) - 2
        for anchor in range(document.num_prompt_tokens - 1, last):
            yield row, start + anchor, last - anchor
            row += 1
        start += len(document.token_ids) - 1


@pytest.mark.parametrize("block_scores", [1 << 20, 40, 1])
def test_every_step_equals_speculators_forward_pass(block_scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask that is off by one position or leaks between documents trains a drafter for an engine that does not exist.
    Small blocks are how a long document is cut."""
    monkeypatch.setattr(packing, "_BLOCK_SCORES", block_scores)
    documents = make_documents([(3, 9), (1, 4), (6, 2), (2, 13)])
    drafter = make_drafter()
    got, expected = guessed_logits(drafter, documents, STEPS), speculators_forward(drafter, documents)
    for row, position, judged in anchors_of(documents):
        for step in range(min(STEPS, judged)):
            torch.testing.assert_close(got[step][row], expected[step][0, position], rtol=1e-4, atol=1e-4)


def test_attention_of_a_long_document_is_cut_and_of_unequal_ones_not_padded() -> None:
    """Scores grow with the square of the length: 30,000 tokens at once would be gigabytes for each head and step."""
    (long,) = make_documents([(5, 6_000)])
    pack = make_pack([long], CPU)
    assert len(pack.anchored) > 20 and max(block.num_scores for block in pack.anchored) <= packing._BLOCK_SCORES
    mixed = make_pack(make_documents([(2, 10)] * 6 + [(2, 400)]), CPU)
    needed = sum(pair * pair for pair in [10] * 6 + [400])
    assert sum(block.num_scores for block in mixed.everywhere) < 1.5 * needed


def test_guesses_are_compared_with_the_distribution_that_follows_them() -> None:
    """Target and guess one position apart would still train to something."""
    documents = make_documents([(2, 5), (3, 4)])
    drafter, head = make_drafter(), make_head()
    logits = guessed_logits(drafter, documents, STEPS)
    guesses = guess(drafter, make_pack(documents, CPU), head, STEPS)
    overlap, count = [0.0] * STEPS, [0] * STEPS
    row = 0
    for document in documents:
        last = len(document.token_ids) - 2
        for anchor in range(document.num_prompt_tokens - 1, last):
            for step in range(min(STEPS, last - anchor)):
                # After position anchor + 1 + step the policy draws token anchor + 2 + step, which this step guesses.
                p = (torch.from_numpy(document.last[anchor + 1 + step]) @ head.T).softmax(-1)
                q = logits[step][row].softmax(-1)
                overlap[step] += float(torch.minimum(p, q).sum())
                count[step] += 1
                drawn = int(document.token_ids[anchor + 2 + step])
                assert float(guesses.accept_AJ[row, step]) == pytest.approx(
                    min(1.0, float(q[drawn] / p[drawn])), rel=1e-4
                )
            row += 1
    assert guesses.count_J.tolist() == count
    assert guesses.overlap_J.tolist() == pytest.approx(overlap, rel=1e-5)


def test_chunked_output_head_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a vocabulary of 150,000 the logits of a pass do not fit; what is cut must add up to the same."""
    documents = make_documents([(3, 9), (1, 6)])
    whole = guess(make_drafter(), make_pack(documents, CPU), make_head(), STEPS)
    monkeypatch.setattr(loss, "_CHUNK_LOGITS", 3 * VOCABULARY)
    cut = guess(make_drafter(), make_pack(documents, CPU), make_head(), STEPS)
    torch.testing.assert_close(cut.loss, whole.loss)
    torch.testing.assert_close(cut.accept_AJ, whole.accept_AJ)
