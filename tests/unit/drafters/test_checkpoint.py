"""Checkpoints of learned drafters of every kind, and what preflight refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel, SpeculatorModelConfig

from benchmarks.workload import random_drafter
from drafter_cases import HIDDEN, KINDS, guessed_logits, make_documents, make_drafter, policy_config
from paceline.drafters.checkpoint import load, preflight, save, widen, with_own_embeddings
from paceline.drafters.kinds import write_new_drafter
from paceline.drafters.packing import Document
from paceline.files import write_checksums
from random_policy import make_policy


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_drafter_loads_bit_equal_here_and_in_speculators(kind: str, tmp_path: Path) -> None:
    drafter = make_drafter(kind)
    save(drafter, tmp_path / "drafter")
    again = load(tmp_path / "drafter")
    expected = {name: w for name, w in drafter.state_dict().items() if not name.startswith("verifier_")}
    for name, weight in expected.items():
        assert torch.equal(again.state_dict()[name], weight), name
    config: Any = SpeculatorModelConfig.from_pretrained(tmp_path / "drafter")
    config.transformer_layer_config._attn_implementation = "eager"
    theirs = SpeculatorModel.registered_model_class_from_config(config)(config)
    result = theirs.load_state_dict(load_file(tmp_path / "drafter" / "model.safetensors"), strict=False)
    assert all(name.startswith("verifier_") for name in result.missing_keys) and not result.unexpected_keys


@pytest.mark.parametrize("kind", KINDS)
def test_a_widened_drafter_guesses_the_same_of_a_grown_policy(kind: str, tmp_path: Path) -> None:
    """The grown policy's taps are the small one's with zeros behind each."""
    (tmp_path / "policy").mkdir()
    policy_config(hidden_size=3 * HIDDEN, num_layers=9).save_pretrained(tmp_path / "policy")
    save(make_drafter(kind), tmp_path / "small")
    widen(tmp_path / "small", tmp_path / "large", policy_path=tmp_path / "policy", taps=(2, 6, 9))
    preflight(tmp_path / "large", tmp_path / "policy", kind=kind, max_model_len=64)
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
    small, large = (
        guessed_logits(load(tmp_path / "small"), documents, 5),
        guessed_logits(load(tmp_path / "large"), wide, 5),
    )
    torch.testing.assert_close(torch.stack(large), torch.stack(small))


@pytest.mark.parametrize("tied", [False, True])
def test_ends_that_equal_the_policy_s_in_the_engine_s_precision_are_told_apart(tied: bool, tmp_path: Path) -> None:
    """vLLM compares what it loaded, and would share them: a difference that bfloat16 rounds away is none."""
    drafter = make_drafter()
    with torch.no_grad():
        drafter.lm_head.weight.copy_(drafter.embed_tokens.weight)
    save(drafter, tmp_path / "drafter")
    embedding_VD = drafter.embed_tokens.weight.detach()
    (tmp_path / "policy").mkdir()
    weights = {"model.embed_tokens.weight": embedding_VD * (1 + 1e-6)}
    if not tied:
        weights["lm_head.weight"] = embedding_VD + 1.0
    save_file(weights, tmp_path / "policy" / "model.safetensors")
    out = with_own_embeddings(
        tmp_path / "drafter", tmp_path / "own", model_path=tmp_path / "policy", dtype=torch.bfloat16
    )
    assert out == tmp_path / "own"
    own = load(out)
    changed_V = torch.ones(
        len(embedding_VD), dtype=torch.int64
    )  # in every row: a tensor-parallel worker sees some only
    assert torch.equal((own.embed_tokens.weight.bfloat16() != embedding_VD.bfloat16()).sum(1), changed_V)
    assert torch.equal((own.lm_head.weight.bfloat16() != embedding_VD.bfloat16()).sum(1), changed_V * int(tied))
    assert with_own_embeddings(out, tmp_path / "again", model_path=tmp_path / "policy", dtype=torch.bfloat16) == out


def test_a_random_drafter_has_the_shapes_and_none_of_the_weights(tmp_path: Path) -> None:
    save(make_drafter(), tmp_path / "drafter")
    random_drafter(tmp_path / "drafter", tmp_path / "random", seed=3)
    trained, random = (load_file(tmp_path / name / "model.safetensors") for name in ("drafter", "random"))
    assert {name: w.shape for name, w in random.items()} == {name: w.shape for name, w in trained.items()}
    for name, weight in random.items():
        if weight.ndim == 2:
            assert abs(float(torch.corrcoef(torch.stack([weight.flatten(), trained[name].flatten()]))[0, 1])) < 0.1, (
                name
            )


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_drafter_fits_its_policy_and_is_the_same_when_a_run_goes_on(kind: str, tmp_path: Path) -> None:
    policy = make_policy(tmp_path / "policy")
    for name in ("first", "again"):
        write_new_drafter(kind, policy, tmp_path / name, seed=3, draft_length=3)
    preflight(tmp_path / "first", policy, kind=kind, max_model_len=448)
    first, again = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "again"))
    assert all(torch.equal(weight, again[name]) for name, weight in first.items())
    embedding_VD = load_file(policy / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(first["lm_head.weight"], embedding_VD), "it knows nothing of the policy's output head"


def test_a_policy_without_an_embedding_that_is_known_gets_no_new_drafter(tmp_path: Path) -> None:
    policy = make_policy(tmp_path / "policy")
    weights = load_file(policy / "model.safetensors")
    save_file({f"language_{name}": weight for name, weight in weights.items()}, policy / "model.safetensors")
    with pytest.raises(ValueError, match=r"speculation\.drafter\.init: got 'random' with .*paceline draft train"):
        write_new_drafter("eagle3", policy, tmp_path / "new", seed=3, draft_length=3)


def _edit(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def apply(drafter: Path) -> None:
        tree = json.loads((drafter / "config.json").read_text())
        change(tree)
        (drafter / "config.json").write_text(json.dumps(tree))
        write_checksums(drafter)

    return apply


def _flip(drafter: Path) -> None:
    content = bytearray((drafter / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (drafter / "model.safetensors").write_bytes(bytes(content))


def _truncate(drafter: Path) -> None:
    (drafter / "SHA256SUMS").unlink()
    content = (drafter / "model.safetensors").read_bytes()
    (drafter / "model.safetensors").write_bytes(content[: len(content) // 2])


def _narrow(drafter: Path) -> None:
    weights = load_file(drafter / "model.safetensors")
    weights["fc.weight"] = weights["fc.weight"][:, : 2 * HIDDEN].contiguous()
    save_file(weights, drafter / "model.safetensors")
    (drafter / "SHA256SUMS").unlink()


def _retokenize(drafter: Path) -> None:
    (drafter / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"b": 0}}}))
    write_checksums(drafter)


EAGLE3_TAPS, DFLASH_TAPS = "eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("break_it", "max_model_len", "complaint"),
    [
        (
            _edit(lambda tree: tree["transformer_layer_config"].update(vocab_size=99)),
            64,
            "a vocabulary of 99; must be 24",
        ),
        (_edit(lambda tree: tree.update(draft_vocab_size=8)), 64, "drafts from 8 tokens and its d2t is missing"),
        (lambda _: None, 65, r"knows 64 positions; must be at least max_model_len \(65\)"),
        (_edit(lambda tree: tree.update(target_hidden_size=48)), 64, "hidden states of 48"),
        (_narrow, 64, r"through fc.weight \(32, 64\)"),
        (
            _edit(lambda tree: tree.update({EAGLE3_TAPS: [1, 3, 5], DFLASH_TAPS: [1, 3, 5]})),
            64,
            r"taps layers \[1, 3, 5\]",
        ),
        (
            _edit(lambda tree: tree.update({EAGLE3_TAPS: [1, 3, 3], DFLASH_TAPS: [1, 3, 3]})),
            64,
            r"taps layers \[1, 3, 3\]",
        ),
        (_edit(lambda tree: tree.update(speculators_model_type="medusa")), 64, "is a 'medusa' drafter"),
        (_retokenize, 64, "another tokenizer"),
        (_flip, 64, "differs from its checksum"),
        (_truncate, 64, "cannot be read"),
        (lambda drafter: (drafter / "config.json").unlink(), 64, "no config.json"),
    ],
)
def test_preflight_refuses(
    kind: str, break_it: Callable[[Path], None], max_model_len: int, complaint: str, tmp_path: Path
) -> None:
    """vLLM loads most of these, and accepts nothing afterward."""
    policy = _saved(kind, tmp_path)
    break_it(tmp_path / "drafter")
    with pytest.raises(ValueError, match=complaint):
        preflight(tmp_path / "drafter", policy, kind=kind, max_model_len=max_model_len)


def test_preflight_refuses_a_mask_that_is_no_token(tmp_path: Path) -> None:
    """vLLM would look up its embedding beyond the table."""
    policy = _saved("dflash", tmp_path)
    _edit(lambda tree: tree.update(mask_token_id=24))(tmp_path / "drafter")
    with pytest.raises(ValueError, match=r"mask_token_id 24; must be one of 0\.\.23"):
        preflight(tmp_path / "drafter", policy, kind="dflash", max_model_len=64)


def test_preflight_reads_the_format_of_dflash_s_authors(tmp_path: Path) -> None:
    """They number the taps by layer: what layer i puts out, where speculators and vLLM's engine say i + 1."""
    policy = _saved("dflash", tmp_path)
    tree = json.loads((tmp_path / "drafter" / "config.json").read_text())
    theirs = tree["transformer_layer_config"] | {"dflash_config": {"target_layer_ids": [0, 2, 3], "mask_token_id": 1}}
    (tmp_path / "drafter" / "config.json").write_text(json.dumps(theirs))
    (tmp_path / "drafter" / "SHA256SUMS").unlink()  # theirs have none
    preflight(tmp_path / "drafter", policy, kind="dflash", max_model_len=64)
    _edit(lambda tree: tree["dflash_config"].update(target_layer_ids=[0, 2, 4]))(tmp_path / "drafter")
    with pytest.raises(ValueError, match=r"taps layers \[1, 3, 5\]"):
        preflight(tmp_path / "drafter", policy, kind="dflash", max_model_len=64)


def _saved(kind: str, directory: Path) -> Path:
    """A policy, and beside it its drafter, with which nothing is wrong yet."""
    policy = directory / "policy"
    policy.mkdir()
    policy_config().save_pretrained(policy)
    (policy / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    save(make_drafter(kind, policy_path=policy), directory / "drafter", tokenizer=policy / "tokenizer.json")
    preflight(directory / "drafter", policy, kind=kind, max_model_len=64)
    return policy
