"""What `paceline replay` reads from a run directory, and its verdict."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.cli import main
from paceline.files import sha256_of
from paceline.sessions.replay import find, judge
from paceline.types import GroupId, RolloutId

TOKENS = np.array([5, 6, 7], np.int32)
ID = RolloutId(GroupId(9), 1)


def write_run(directory: Path, *, speculation: dict[str, Any] | None = None, max_age: int = 0) -> Path:
    directory.mkdir()
    config = {"policy": {"model": "arena:tiny"}, "run": {"max_age": max_age}, "speculation": speculation}
    columns = {"group": ["9.0/train"] * 2, "index": [0, 1], "length": [2, 3], "tokens": ["0" * 16, sums(TOKENS)]}
    records = [
        {"kind": "run", "config": config},
        {"kind": "step", "step": 1, "metrics": {"sync/version": 1.0}},
        {"kind": "step", "step": 2, "metrics": {}},  # an update that was skipped
        {"kind": "rollouts", "step": 3, **columns},
        {"kind": "step", "step": 3, "metrics": {"sync/version": 2.0}},
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name in ("state/step-00000003", "policy/step-3"):
        (directory / name).mkdir(parents=True)
    return directory


def sums(tokens: np.ndarray) -> str:
    return sha256_of([tokens.data])[:16]


def test_a_rollout_is_found_with_its_policy_and_the_policies_on_disk(tmp_path: Path):
    found = find(write_run(tmp_path / "run"), ID)
    assert (found.step, found.length, found.version) == (3, 3, 1)
    assert found.saved == {0: None, 2: tmp_path / "run" / "policy" / "step-3"}, "not the checkpoint of the same step"


def test_the_version_of_an_asynchronous_rollout_is_not_guessed(tmp_path: Path):
    assert find(write_run(tmp_path / "run", max_age=1), ID).version is None


@pytest.mark.parametrize(
    ("rollout", "said"),
    [
        ("9.0/train:1", "version 1, which is not on disk; versions 0, 2 are. run.save_every=1 keeps all"),
        ("9.0/train:7", "which .*metrics.jsonl does not have; such as 9.0/train:1"),
        ("9:1", "must be as in metrics.jsonl: 17.0/train:3"),
    ],
)
def test_what_cannot_be_replayed_is_refused_with_advice(tmp_path: Path, capsys, rollout: str, said: str):
    run = write_run(tmp_path / "run")
    assert main(["replay", str(run), "--rollout", rollout]) == 2
    assert re.search(said, capsys.readouterr().err)


def test_standard_verification_is_refused(tmp_path: Path):
    run = write_run(tmp_path / "run", speculation={"verification": "standard"})
    with pytest.raises(ValueError, match=r"must have speculation\.verification='coupled' or no speculation"):
        find(run, ID)


def test_the_checksum_decides_and_kept_tokens_give_the_position(tmp_path: Path):
    logged = find(write_run(tmp_path / "run"), ID)
    assert judge("plain", [5, 6, 7], logged, None).equal
    wrong = judge("plain", [5, 9, 7], logged, TOKENS)
    assert (wrong.equal, wrong.first_difference) == (False, 1)
    assert judge("plain", [5, 9, 7], logged, None).first_difference is None
