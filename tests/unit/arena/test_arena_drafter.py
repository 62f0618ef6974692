"""The arena's drafters: where they are found, and how a grown policy's is made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from drafter_cases import HIDDEN, make_drafter, policy_config
from paceline import assets
from paceline.arena import drafter as arena
from paceline.cli.common import LEARNED
from paceline.drafters.checkpoint import preflight, save
from paceline.drafters.kinds import KINDS, default_taps
from paceline.drafters.provenance import Evaluation, Provenance


def test_every_kind_can_be_chosen_trained_and_found() -> None:
    """A kind without an arena drafter would fail at `speculation.drafter.path=arena:small/KIND`."""
    assert set(LEARNED) == set(KINDS) == set(assets.DRAFTERS)


@pytest.mark.parametrize(
    ("kind", "key"), [("eagle3", "eagle_aux_hidden_state_layer_ids"), ("dflash", "aux_hidden_state_layer_ids")]
)
def test_taps_of_a_grown_policy_are_where_growth_has_put_their_layers(kind: str, key: str, tmp_path: Path) -> None:
    large = tmp_path / "large"
    large.mkdir()
    policy_config(hidden_size=2 * HIDDEN, num_layers=12).save_pretrained(large)
    (large / "growth.json").write_text(json.dumps({"original_layers": [1, 4, 7, 10]}))
    save(make_drafter(kind), tmp_path / "source")
    evaluation = Evaluation(overlap=(0.9, 0.8), divergence=(0.1, 0.2), accepted_length=(1.9, 2.6), num_tokens=7)
    arena.write_evaluation(tmp_path / "source", evaluation)
    arena.write_provenance(tmp_path / "source", Provenance(policy="a", data="b", start="c", num_tokens=1, seed=0))
    arena._widen(tmp_path / "source", tmp_path / "drafter", policy_path=large, policy="arena:large")
    config = json.loads((tmp_path / "drafter" / "config.json").read_text())
    # After the first, the third and the fourth original layer; tap i is what layer i - 1 puts out.
    assert config[key] == [2, 8, 11]
    preflight(tmp_path / "drafter", large, kind=kind, max_model_len=64)
    read = arena.read_evaluation(tmp_path / "drafter")
    assert (read.overlap, read.accepted_length, read.num_tokens) == (evaluation.overlap, evaluation.accepted_length, 7)


@pytest.mark.parametrize(("num_layers", "taps"), [(2, (0, 1, 2)), (4, (1, 3, 4)), (28, (2, 14, 25)), (8, (2, 4, 5))])
def test_default_taps(num_layers: int, taps: tuple[int, int, int]) -> None:
    assert default_taps(num_layers) == taps
