"""The drafter against speculators' own forward pass, its checkpoints, and what preflight refuses."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

from drafter_cases import HIDDEN, TAPS, VOCABULARY, make_documents, make_drafter, make_head, policy_config
from paceline.draft import unroll
from paceline.draft.eagle import load, preflight, random_drafter, save, widen
from paceline.draft.unroll import Document, guess, make_pack

CPU = torch.device("cpu")
STEPS = 5


@contextmanager
def recorded_logits(drafter: Eagle3DraftModel) -> Iterator[list[torch.Tensor]]:
    logits: list[torch.Tensor] = []
    handle = drafter.lm_head.register_forward_hook(lambda _module, _inputs, output: logits.append(output.detach()))
    try:
        yield logits
    finally:
        handle.remove()


def ours(drafter: Eagle3DraftModel, documents: list[Document]) -> list[torch.Tensor]:
    with recorded_logits(drafter) as logits:
        guess(drafter, make_pack(documents, CPU), make_head(), STEPS)
    return logits


def speculators_forward(drafter: Eagle3DraftModel, documents: list[Document]) -> list[torch.Tensor]:
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
    taps, tokens, ids, positions = (torch.from_numpy(np.concatenate(column))[None] for column in zip(*parts, strict=True))
    with recorded_logits(twin) as logits, torch.no_grad():
        twin(taps, tokens.long(), ids, position_ids=positions, ttt_steps=STEPS)
    return logits


def anchors_of(documents: list[Document]) -> Iterator[tuple[int, int, int]]:
    """Row among the anchors, row among all positions but the last of each document, and steps that the document can judge."""
    start = row = 0
    for document in documents:
        last = len(document.token_ids) - 2
        for anchor in range(document.num_prompt_tokens - 1, last):
            yield row, start + anchor, last - anchor
            row += 1
        start += len(document.token_ids) - 1


@pytest.mark.parametrize("block_scores", [1 << 20, 40, 1])
def test_every_step_equals_speculators_forward_pass(block_scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask that is off by one position or leaks between documents trains a drafter for an engine that does not exist. Small
    blocks are how a long document is cut."""
    monkeypatch.setattr(unroll, "_BLOCK_SCORES", block_scores)
    documents = make_documents([(3, 9), (1, 4), (6, 2), (2, 13)])
    drafter = make_drafter()
    got, expected = ours(drafter, documents), speculators_forward(drafter, documents)
    for row, position, judged in anchors_of(documents):
        for step in range(min(STEPS, judged)):
            torch.testing.assert_close(got[step][row], expected[step][0, position], rtol=1e-4, atol=1e-4)


def test_attention_of_a_long_document_is_cut_and_of_unequal_ones_not_padded() -> None:
    """Scores grow with the square of the length: 30,000 tokens at once would be gigabytes for each head and step."""
    (long,) = make_documents([(5, 6_000)])
    pack = make_pack([long], CPU)
    assert len(pack.later) > 20 and max(block.num_scores for block in pack.later) <= unroll._BLOCK_SCORES
    mixed = make_pack(make_documents([(2, 10)] * 6 + [(2, 400)]), CPU)
    needed = sum(pair * pair for pair in [10] * 6 + [400])
    assert sum(block.num_scores for block in mixed.first) < 1.5 * needed


def test_guesses_are_compared_with_the_distribution_that_follows_them() -> None:
    """Teacher and guess one position apart would still train to something."""
    documents = make_documents([(2, 5), (3, 4)])
    drafter, head = make_drafter(), make_head()
    logits = ours(drafter, documents)
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
                assert float(guesses.accept_AJ[row, step]) == pytest.approx(min(1.0, float(q[drawn] / p[drawn])), rel=1e-4)
            row += 1
    assert guesses.count_J.tolist() == count
    assert guesses.overlap_J.tolist() == pytest.approx(overlap, rel=1e-5)


def test_chunked_output_head_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a vocabulary of 150,000 the logits of a pass do not fit; what is cut must add up to the same."""
    documents = make_documents([(3, 9), (1, 6)])
    whole = guess(make_drafter(), make_pack(documents, CPU), make_head(), STEPS)
    monkeypatch.setattr(unroll, "_CHUNK_LOGITS", 3 * VOCABULARY)
    cut = guess(make_drafter(), make_pack(documents, CPU), make_head(), STEPS)
    torch.testing.assert_close(cut.loss, whole.loss)
    torch.testing.assert_close(cut.accept_AJ, whole.accept_AJ)


def test_a_saved_drafter_loads_bit_equal_here_and_in_speculators(tmp_path: Path) -> None:
    drafter = make_drafter()
    save(drafter, tmp_path / "drafter")
    again = load(tmp_path / "drafter")
    expected = {name: w for name, w in drafter.state_dict().items() if not name.startswith("verifier_")}
    for name, weight in expected.items():
        assert torch.equal(again.state_dict()[name], weight), name
    config = Eagle3SpeculatorConfig.from_pretrained(tmp_path / "drafter")
    config.transformer_layer_config._attn_implementation = "eager"
    theirs = Eagle3DraftModel(config).load_state_dict(load_file(tmp_path / "drafter" / "model.safetensors"), strict=False)
    assert all(name.startswith("verifier_") for name in theirs.missing_keys) and not theirs.unexpected_keys
    assert config.eagle_aux_hidden_state_layer_ids == list(TAPS)


def test_a_widened_drafter_guesses_the_same_of_a_grown_policy(tmp_path: Path) -> None:
    """The grown policy's taps are the small one's with zeros behind each."""
    (tmp_path / "policy").mkdir()
    policy_config(hidden_size=3 * HIDDEN, num_layers=9).save_pretrained(tmp_path / "policy")
    save(make_drafter(), tmp_path / "small")
    widen(tmp_path / "small", tmp_path / "large", policy_path=tmp_path / "policy", taps=(2, 6, 9))
    preflight(tmp_path / "large", tmp_path / "policy", max_model_len=64)
    documents = make_documents([(3, 9), (1, 4)])
    wide = [
        Document(
            token_ids=d.token_ids,
            num_prompt_tokens=d.num_prompt_tokens,
            taps=np.pad(d.taps, ((0, 0), (0, 0), (0, 2 * HIDDEN))),
            last=d.last,
        )
        for d in documents
    ]
    for small, large in zip(ours(load(tmp_path / "small"), documents), ours(load(tmp_path / "large"), wide), strict=True):
        torch.testing.assert_close(large, small)


def test_a_random_drafter_has_the_shapes_and_none_of_the_weights(tmp_path: Path) -> None:
    save(make_drafter(), tmp_path / "drafter")
    random_drafter(tmp_path / "drafter", tmp_path / "random", seed=3)
    taught, random = (load_file(tmp_path / name / "model.safetensors") for name in ("drafter", "random"))
    assert {name: w.shape for name, w in random.items()} == {name: w.shape for name, w in taught.items()}
    for name, weight in random.items():
        if weight.ndim == 2:
            assert abs(float(torch.corrcoef(torch.stack([weight.flatten(), taught[name].flatten()]))[0, 1])) < 0.1, name


def _edit(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def apply(drafter: Path) -> None:
        tree = json.loads((drafter / "config.json").read_text())
        change(tree)
        (drafter / "config.json").write_text(json.dumps(tree))

    return apply


def _flip(drafter: Path) -> None:
    content = bytearray((drafter / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (drafter / "model.safetensors").write_bytes(bytes(content))


def _truncate(drafter: Path) -> None:
    (drafter / "model.safetensors.sha256").unlink()
    content = (drafter / "model.safetensors").read_bytes()
    (drafter / "model.safetensors").write_bytes(content[: len(content) // 2])


def _narrow(drafter: Path) -> None:
    weights = load_file(drafter / "model.safetensors")
    weights["fc.weight"] = weights["fc.weight"][:, : 2 * HIDDEN].contiguous()
    save_file(weights, drafter / "model.safetensors")
    (drafter / "model.safetensors.sha256").unlink()


def _retokenize(drafter: Path) -> None:
    (drafter / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"b": 0}}}))


@pytest.mark.parametrize(
    ("break_it", "max_model_len", "complaint"),
    [
        (_edit(lambda tree: tree["transformer_layer_config"].update(vocab_size=99)), 64, "a vocabulary of 99; must be 24"),
        (_edit(lambda tree: tree.update(draft_vocab_size=8)), 64, "drafts from 8 tokens and its d2t is missing"),
        (lambda _: None, 65, r"knows 64 positions; must be at least max_model_len \(65\)"),
        (_edit(lambda tree: tree.update(target_hidden_size=48)), 64, "hidden states of 48"),
        (_narrow, 64, r"through fc.weight \(32, 64\)"),
        (_edit(lambda tree: tree.update(eagle_aux_hidden_state_layer_ids=[1, 3, 5])), 64, r"taps layers \[1, 3, 5\]"),
        (_edit(lambda tree: tree.update(eagle_aux_hidden_state_layer_ids=[1, 3, 3])), 64, r"taps layers \[1, 3, 3\]"),
        (_edit(lambda tree: tree.update(speculators_model_type="dflash")), 64, "is a 'dflash' drafter"),
        (_retokenize, 64, "another tokenizer"),
        (_flip, 64, "differs from its checksum"),
        (_truncate, 64, "cannot be read"),
        (lambda drafter: (drafter / "config.json").unlink(), 64, "no config.json"),
    ],
)
def test_preflight_refuses(break_it: Callable[[Path], None], max_model_len: int, complaint: str, tmp_path: Path) -> None:
    """vLLM loads most of these, and accepts nothing afterwards."""
    policy = tmp_path / "policy"
    policy.mkdir()
    policy_config().save_pretrained(policy)
    (policy / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    save(make_drafter(policy_path=policy), tmp_path / "drafter", tokenizer=policy / "tokenizer.json")
    preflight(tmp_path / "drafter", policy, max_model_len=64)
    break_it(tmp_path / "drafter")
    with pytest.raises(ValueError, match=complaint):
        preflight(tmp_path / "drafter", policy, max_model_len=max_model_len)
