"""The checkpoints that come with the package: whole, small, and free of the machine that made them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from paceline import assets
from paceline.drafters.checkpoint import preflight
from paceline.drafters.provenance import Evaluation, Provenance, read_evaluation, write_evaluation, write_provenance
from paceline.files import ChecksumError, write_checksums
from scripts.rebuild_arena import rebuild

PAIRS = [(policy, kind) for policy in assets.POLICIES for kind in assets.DRAFTERS]
DIRECTORIES = [*assets.POLICIES, *(f"{policy}-{kind}" for policy, kind in PAIRS)]


def test_all_of_it_is_small_enough_to_ship() -> None:
    total = sum(file.stat().st_size for file in assets.ROOT.rglob("*") if file.is_file())
    assert total <= 15e6


@pytest.mark.parametrize("name", DIRECTORIES)
def test_weights_are_bfloat16(name: str) -> None:
    with safe_open(assets.ROOT / name / "model.safetensors", "np") as file:
        kinds = {file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118  not a dict
    assert kinds - {"I64", "BOOL"} == {"BF16"}


@pytest.mark.parametrize("name", DIRECTORIES)
def test_no_file_names_a_path_of_the_machine_that_made_it(name: str) -> None:
    for file in (assets.ROOT / name).glob("*.json"):
        assert not any(part in file.read_text(encoding="utf-8") for part in ("/tmp", "/home", "/root", "/work")), file


@pytest.mark.parametrize(("policy", "kind"), PAIRS)
def test_drafter_fits_its_policy_and_not_the_other(policy: str, kind: str) -> None:
    other = next(name for name in assets.POLICIES if name != policy)
    preflight(assets.drafter(policy, kind), assets.policy(policy), kind=kind, max_model_len=64)
    with pytest.raises(ValueError, match="drafter"):
        preflight(assets.drafter(policy, kind), assets.policy(other), kind=kind, max_model_len=64)


@pytest.mark.parametrize(("policy", "kind"), PAIRS)
def test_card_says_what_the_evaluation_of_the_shipped_drafter_says(policy: str, kind: str) -> None:
    lengths = read_evaluation(assets.drafter(policy, kind)).accepted_length
    entry = json.loads((assets.ROOT / rebuild.RECORD_FILE).read_text(encoding="utf-8"))["drafters"][f"{policy}-{kind}"]
    assert entry["shipped"] == {k: lengths[int(k) - 1] for k in entry["shipped"]}
    row = next(
        line for line in (assets.ROOT / rebuild.CARD_FILE).read_text().splitlines() if f"| {policy}-{kind} |" in line
    )
    assert f" {lengths[6]:.2f} (" in row


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"whole")
    write_checksums(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"other")
    with pytest.raises(ChecksumError, match="differs from its checksum"):
        assets._verified(tmp_path)


def test_the_middle_one_of_three_builds_is_shipped_and_all_are_in_the_card(tmp_path: Path) -> None:
    """The best of three would promise more than a rebuild keeps."""
    builds = []
    for number, best in enumerate((4.0, 6.0, 5.0)):
        build = tmp_path / "builds" / f"tiny-eagle3-{number}"
        build.mkdir(parents=True)
        evaluation = Evaluation(
            overlap=(0.9,) * 7, divergence=(0.1,) * 7, accepted_length=(1.5, 2, 2.5, 3, 3.2, 3.5, best), num_tokens=7
        )
        write_evaluation(build, evaluation)
        write_provenance(build, Provenance(policy="p", data="d", start="s", num_tokens=number, seed=number))
        builds.append(build)
    entry = rebuild._ship("tiny", "eagle3", builds, tmp_path)
    assert read_evaluation(tmp_path / "tiny-eagle3").accepted_length[-1] == 5.0
    text = rebuild.card({"machine": "a CPU", "drafters": {"tiny-eagle3": entry}})
    assert "| tiny-eagle3 | 2.50 (2.50 to 2.50) | 3.20 (3.20 to 3.20) | 5.00 (4.00 to 6.00) | 3 | 1 |" in text
