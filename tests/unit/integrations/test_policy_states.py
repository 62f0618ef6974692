"""The policy of another trainer: its newest whole checkpoint is found, loaded, and left when a newer one is there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from contexts import one_rank
from paceline.config import BufferConfig
from paceline.integrations.policy_states import PolicyStates, newest_policy
from paceline.types import Sample
from random_policy import aged, make_drafter, make_policy

FOREVER = float("inf")


def found(*directories: Path) -> Path | None:
    saved = newest_policy(directories)
    return None if saved is None else saved.path


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("policy"))


def copy(saved: Path, to: Path, ago_s: float) -> Path:
    shutil.copytree(saved, to)
    return aged(to, ago_s)


def test_newest_checkpoint_is_found_where_trainers_put_it(saved: Path, tmp_path: Path) -> None:
    """By its time and not by its number: a run that went on from step 500 has steps of its former life."""
    base = copy(saved, tmp_path / "base", 1000)
    run = tmp_path / "run"
    assert found(base, run) == base, "the trainer has saved nothing yet"
    first = copy(saved, run / "checkpoint-1000", 500)
    assert found(base, run) == first
    copy(saved, run / "checkpoint-600", 100)
    assert found(base, run) == run / "checkpoint-600"
    assert found(copy(saved, run / "global_step_7" / "actor" / "huggingface", 50)) is not None
    assert found(run) == run / "global_step_7" / "actor" / "huggingface"


def test_drafters_critics_and_unfinished_checkpoints_are_passed_over(saved: Path, tmp_path: Path) -> None:
    """Loading half a checkpoint raises at best; one that is still written to may be whole only by its length."""
    good = copy(saved, tmp_path / "good", 100)
    copy(saved, tmp_path / "writing", -60)  # however long this test takes
    cut = copy(saved, tmp_path / "cut", 50)
    weights = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(weights[:-100])
    missing = copy(saved, tmp_path / "missing", 50)
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (missing / "model.safetensors.index.json").write_text(json.dumps(index))
    (copy(saved, tmp_path / "no_config", 50) / "config.json").write_text("{")
    aged(make_drafter(good, tmp_path / "drafter"), 50)
    critic = copy(saved, tmp_path / "critic", 50)
    config = json.loads((critic / "config.json").read_text()) | {"architectures": ["Qwen3ForTokenClassification"]}
    (critic / "config.json").write_text(json.dumps(config))
    for path in (cut, missing, critic):
        aged(path, 50)
    assert found(tmp_path) == good


def test_newer_policy_is_followed_and_a_bad_one_is_left(saved: Path, tmp_path: Path) -> None:
    """Hidden states and head must be of one policy; one that cannot be loaded must not end training."""
    drafter = make_drafter(saved, tmp_path / "drafter")
    run = tmp_path / "run"
    states = PolicyStates([run], drafter, one_rank(microbatch_tokens=512))
    sample = Sample(
        token_ids=np.arange(2, 14, dtype=np.int32),
        num_prompt_tokens=4,
        logp=np.zeros(8, np.float32),
        advantage=0.0,
    )
    config = BufferConfig()
    try:
        assert not states.follow() and states.documents([sample], config, seed=(0,), until_s=FOREVER) == []
        first = copy(saved, run / "checkpoint-1", 100)
        assert states.follow() and states.path == first and not states.follow()
        (before,) = states.documents([sample], config, seed=(0,), until_s=FOREVER)
        assert before.taps.shape == (12, 3, 64) and states.documents([sample], config, seed=(0,), until_s=0.0) == []
        second = copy(saved, run / "checkpoint-2", 50)
        weights = load_file(second / "model.safetensors")
        save_file({name: 1.5 * w for name, w in weights.items()}, second / "model.safetensors", {"format": "pt"})
        aged(second, 50)
        assert states.follow() and states.path == second and states.version == 2
        (after,) = states.documents([sample], config, seed=(0,), until_s=FOREVER)
        assert not np.allclose(before.last, after.last)
        assert states.head_VD is not None
        assert torch.equal(states.head_VD, 1.5 * weights["model.embed_tokens.weight"])
        bad = copy(saved, run / "checkpoint-3", 10)
        save_file({"strange": torch.zeros(1)}, bad / "model.safetensors", {"format": "pt"})
        aged(bad, 10)
        with pytest.raises(ValueError, match="checkpoint-3"):
            states.follow()
        assert not states.follow(), "told once"
        assert (states.path, states.version, states.num_failures) == (second, 2, 1)
        (again,) = states.documents([sample], config, seed=(0,), until_s=FOREVER)
        assert np.array_equal(again.last, after.last)
    finally:
        states.close()
