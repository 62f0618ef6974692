"""Rounds of drafter training through files: what is averaged, what is kept, and what a kill in mid write leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from paceline.draft.drift import Verdict
from paceline.draft.exchange import Exchange, Progress, drafter_weights


@pytest.fixture
def exchange(tmp_path: Path) -> Exchange:
    (tmp_path / "checkpoint").mkdir()
    save_file({"fc.weight": torch.zeros(2)}, tmp_path / "checkpoint" / "model.safetensors")
    return Exchange(tmp_path / "rounds", tmp_path / "checkpoint")


def state(value: float) -> dict[str, torch.Tensor]:
    return {"drafter/fc.weight": torch.full((2,), value), "optimizer/0/0/exp_avg": torch.full((2,), 10 * value)}


def test_a_round_is_the_mean_of_what_its_workers_made_by_tokens_seen(exchange: Exchange) -> None:
    exchange.put_state(0, "a", state(1.0), 300)
    exchange.put_state(0, "b", state(5.0), 100)
    assert exchange.fresh_tokens() == 400
    assert exchange.close_round() == 1
    assert exchange.base(1)["drafter/fc.weight"].tolist() == [2.0, 2.0]
    assert exchange.base(1)["optimizer/0/0/exp_avg"].tolist() == [20.0, 20.0]
    assert exchange.fresh_tokens() == 0, "a closed round must not be counted again"


def test_what_a_worker_made_of_an_older_base_comes_too_late(exchange: Exchange) -> None:
    """A worker that was stopped while it wrote goes on after its round was closed: averaging that in would undo the others."""
    exchange.put_state(0, "a", state(1.0), 100)
    exchange.close_round()
    exchange.put_state(0, "b", state(9.0), 100)
    exchange.put_state(1, "a", state(2.0), 100)
    exchange.close_round()
    assert exchange.base(2)["drafter/fc.weight"].tolist() == [2.0, 2.0]


def test_worker_killed_in_mid_write_leaves_nothing_that_counts(exchange: Exchange, tmp_path: Path) -> None:
    exchange.put_state(0, "a", state(1.0), 100)
    whole = (tmp_path / "rounds" / "state-00000000-a.safetensors").read_bytes()
    (tmp_path / "rounds" / ".state-00000000-b.safetensors").write_bytes(whole[: len(whole) // 2])
    exchange.close_round()
    assert exchange.base(1)["drafter/fc.weight"].tolist() == [1.0, 1.0]


def test_the_published_base_is_kept_and_older_ones_go(exchange: Exchange) -> None:
    for value in (1.0, 2.0, 3.0):
        exchange.put_state(exchange.round(), "a", state(value), 1)
        exchange.close_round()
    exchange.publish(1)
    exchange.forget(but=exchange.published())
    assert exchange.base(1)["drafter/fc.weight"].tolist() == [1.0, 1.0]
    assert exchange.base(3)["drafter/fc.weight"].tolist() == [3.0, 3.0]
    with pytest.raises(FileNotFoundError):
        exchange.base(2)


def test_reverting_goes_on_from_the_published_weights(exchange: Exchange) -> None:
    exchange.put_state(0, "a", state(7.0), 1)
    exchange.close_round()
    assert exchange.revert(0) == exchange.round() == 2
    assert drafter_weights(exchange.file(2))["fc.weight"].tolist() == [0.0, 0.0]


def test_weights_of_a_base_have_the_names_of_the_checkpoint_and_no_optimizer(exchange: Exchange) -> None:
    exchange.put_state(0, "a", state(1.0), 1)
    exchange.close_round()
    assert list(drafter_weights(exchange.file(1))) == list(drafter_weights(exchange.file(0))) == ["fc.weight"]


def test_verdicts_and_progress_survive_their_writer(exchange: Exchange) -> None:
    assert exchange.verdict(1) is None and exchange.progress("a") == Progress()
    exchange.put_verdict(1, Verdict(publish=True, why="better", before=2.0, after=3.0))
    exchange.put_progress("a", Progress(training_s=1.5, num_tokens=10))
    assert exchange.verdict(1) == Verdict(publish=True, why="better", before=2.0, after=3.0)
    assert exchange.progress("a") == Progress(training_s=1.5, num_tokens=10)
