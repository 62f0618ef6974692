"""`paceline export drafter`: what it writes, what its card says, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from drafter_cases import make_drafter, policy_config
from paceline import cli
from paceline.drafters.checkpoint import preflight, save
from paceline.drafters.export import export_drafter
from paceline.drafters.provenance import Evaluation, Provenance, read_provenance, write_evaluation, write_provenance

EVALUATION = Evaluation(overlap=(0.91, 0.82), divergence=(0.1, 0.2), accepted_length=(1.9, 2.64), num_tokens=12_109)
PROVENANCE = Provenance(
    policy="arena:small",
    data="prompts.jsonl",
    start="random weights",
    num_tokens=700_123,
    seed=5,
    rl_steps=40,
    versions={"torch": "2.13.0"},
    created="2026-11-15",
)


def make_source(directory: Path, kind: str = "eagle3", policy_path: Path = Path("policy")) -> Path:
    save(make_drafter(kind, policy_path=policy_path), directory)
    write_evaluation(directory, EVALUATION)
    write_provenance(directory, PROVENANCE)
    return directory


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_the_export_is_the_same_drafter_and_fits_the_same_policy(kind: str, tmp_path: Path) -> None:
    policy = tmp_path / "policy"
    policy_config().save_pretrained(policy)
    source = make_source(tmp_path / "drafter", kind)
    assert cli.main(["export", "drafter", str(source), str(tmp_path / "out")]) == 0
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys() and all((before[name] == after[name]).all() for name in before)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == json.loads(
        (source / "config.json").read_text()
    )
    preflight(tmp_path / "out", policy, kind=kind, max_model_len=64)
    assert not list(tmp_path.glob(".*")), "nothing half-written is left"


def test_the_card_states_acceptance_data_provenance_and_how_to_serve(tmp_path: Path) -> None:
    """Who gets a drafter without these cannot tell whether it is worth serving, nor for what."""
    export_drafter(make_source(tmp_path / "drafter", "dflash"), tmp_path / "out")
    text = (tmp_path / "out" / "README.md").read_text()
    assert "# dflash drafter for arena:small" in text
    assert "| acceptance at this position (overlap) | 0.910 | 0.820 |" in text
    assert "| accepted length at this draft length | 1.90 | 2.64 |" in text
    for fact in (
        "12,109 held-out tokens",
        "prompts: prompts.jsonl",
        "random weights",
        "700,123",
        "| seed | 5 |",
        "torch 2.13.0",
        "2026-11-15",
    ):
        assert fact in text
    assert "| RL steps followed | 40:" in text
    served = '{"method": "dflash", "model": "DRAFTER", "num_speculative_tokens": 7}'
    assert f"vllm serve POLICY --host 127.0.0.1 --speculative-config '{served}'" in text
    assert read_provenance(tmp_path / "out") == PROVENANCE


def test_what_was_not_recorded_is_called_so(tmp_path: Path) -> None:
    save(make_drafter(), tmp_path / "drafter")
    export_drafter(tmp_path / "drafter", tmp_path / "out")
    text = (tmp_path / "out" / "README.md").read_text()
    assert "## Acceptance\n\nNot recorded." in text and "## Data and provenance\n\nNot recorded." in text


def test_a_run_gives_the_drafter_in_it_and_not_its_own_config(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text('{"policy": {"model": "arena:small"}}')
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"no drafter/ in it.*speculation\.drafter\.path"):
        export_drafter(run, tmp_path / "out")
    make_source(run / "drafter")
    export_drafter(run, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["speculators_model_type"] == "eagle3"


def test_another_name_of_the_policy_goes_into_card_config_and_provenance(tmp_path: Path) -> None:
    export_drafter(make_source(tmp_path / "drafter"), tmp_path / "out", policy="somebody/policy-8b")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == "somebody/policy-8b"
    assert "for somebody/policy-8b" in (tmp_path / "out" / "README.md").read_text()
    assert read_provenance(tmp_path / "out").policy == "somebody/policy-8b"


def test_the_card_does_not_show_the_home_of_its_maker(tmp_path: Path) -> None:
    save(make_drafter(policy_path=Path.home() / "models" / "mine"), tmp_path / "drafter")
    export_drafter(tmp_path / "drafter", tmp_path / "out")
    text = (tmp_path / "out" / "README.md").read_text()
    assert "`~/models/mine`" in text and str(Path.home()) not in text


def test_what_exists_is_never_overwritten(tmp_path: Path) -> None:
    source = make_source(tmp_path / "drafter")
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match="never overwrites"):
        export_drafter(source, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_damage_and_strangers_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    source = make_source(tmp_path / "drafter")
    weights = bytearray((source / "model.safetensors").read_bytes())
    weights[-5] ^= 1
    (source / "model.safetensors").write_bytes(weights)
    with pytest.raises(ValueError, match=r"SOURCE: .*checksum"):
        export_drafter(source, tmp_path / "out")
    with pytest.raises(ValueError, match="paceline draft train"):
        export_drafter(tmp_path / "nowhere", tmp_path / "out")
    policy_config().save_pretrained(tmp_path / "policy")
    with pytest.raises(ValueError, match="is not a drafter of kind eagle3 or dflash"):
        export_drafter(tmp_path / "policy", tmp_path / "out")
    assert not (tmp_path / "out").exists()
