"""Rounds of drafter training through files: what is averaged, what is kept, and what a kill in mid write leaves."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, NoReturn, cast

import pytest
import torch
from safetensors.torch import save_file

from paceline.cluster.trainers import RoundSender
from paceline.drafters.drift import Verdict
from paceline.drafters.rounds import Progress, Rounds, drafter_weights


@pytest.fixture
def rounds(tmp_path: Path) -> Rounds:
    (tmp_path / "checkpoint").mkdir()
    save_file({"fc.weight": torch.zeros(2)}, tmp_path / "checkpoint" / "model.safetensors")
    return Rounds(tmp_path / "rounds", tmp_path / "checkpoint")


def state(value: float) -> dict[str, torch.Tensor]:
    return {"drafter/fc.weight": torch.full((2,), value), "optimizer/0/0/exp_avg": torch.full((2,), 10 * value)}


def test_a_round_is_the_mean_of_what_its_workers_made_by_tokens_seen(rounds: Rounds) -> None:
    rounds.put_state(0, "a", state(1.0), 300)
    rounds.put_state(0, "b", state(5.0), 100)
    assert rounds.fresh_tokens() == 400
    assert rounds.close_round() == 1
    assert rounds.base(1)["drafter/fc.weight"].tolist() == [2.0, 2.0]
    assert rounds.base(1)["optimizer/0/0/exp_avg"].tolist() == [20.0, 20.0]
    assert rounds.fresh_tokens() == 0, "a closed round must not be counted again"


def test_what_a_worker_made_of_an_older_base_comes_too_late(rounds: Rounds) -> None:
    """A worker that was stopped while it wrote goes on after its round was closed: averaging that in would undo the
    others."""
    rounds.put_state(0, "a", state(1.0), 100)
    rounds.close_round()
    rounds.put_state(0, "b", state(9.0), 100)
    rounds.put_state(1, "a", state(2.0), 100)
    rounds.close_round()
    assert rounds.base(2)["drafter/fc.weight"].tolist() == [2.0, 2.0]


def test_worker_killed_in_mid_write_leaves_nothing_that_counts(rounds: Rounds, tmp_path: Path) -> None:
    rounds.put_state(0, "a", state(1.0), 100)
    whole = (tmp_path / "rounds" / "state-00000000-a.safetensors").read_bytes()
    (tmp_path / "rounds" / ".state-00000000-b.safetensors").write_bytes(whole[: len(whole) // 2])
    rounds.close_round()
    assert rounds.base(1)["drafter/fc.weight"].tolist() == [1.0, 1.0]


def test_the_published_base_is_kept_and_older_ones_go(rounds: Rounds) -> None:
    for value in (1.0, 2.0, 3.0):
        rounds.put_state(rounds.round(), "a", state(value), 1)
        rounds.close_round()
    rounds.publish(1)
    rounds.forget(but=rounds.published())
    assert rounds.base(1)["drafter/fc.weight"].tolist() == [1.0, 1.0]
    assert rounds.base(3)["drafter/fc.weight"].tolist() == [3.0, 3.0]
    with pytest.raises(FileNotFoundError):
        rounds.base(2)


def test_reverting_goes_on_from_the_published_weights(rounds: Rounds) -> None:
    rounds.put_state(0, "a", state(7.0), 1)
    rounds.close_round()
    assert rounds.revert(0) == rounds.round() == 2
    assert drafter_weights(rounds.file(2))["fc.weight"].tolist() == [0.0, 0.0]


def test_weights_of_a_base_have_the_names_of_the_checkpoint_and_no_optimizer(rounds: Rounds) -> None:
    rounds.put_state(0, "a", state(1.0), 1)
    rounds.close_round()
    assert list(drafter_weights(rounds.file(1))) == list(drafter_weights(rounds.file(0))) == ["fc.weight"]


def test_only_the_owner_can_read_weights_and_verdicts(rounds: Rounds, tmp_path: Path) -> None:
    rounds.put_state(0, "a", state(1.0), 1)
    rounds.publish(0)
    files = list((tmp_path / "rounds").iterdir())
    assert len(files) == 2
    assert [file.stat().st_mode & 0o777 for file in (tmp_path / "rounds", *files)] == [0o700, 0o600, 0o600]


def test_what_killed_workers_left_half_written_is_forgotten_in_time(rounds: Rounds, tmp_path: Path) -> None:
    """A killed worker leaves a partial file the size of the drafter: many of them would fill the node's memory."""
    old, young = (tmp_path / "rounds" / f".state-0000000{n}-b.safetensors.0123abcd.partial" for n in (0, 3))
    for file in (old, young):
        file.write_bytes(b"half")
    for value in (1.0, 2.0, 3.0):
        rounds.put_state(rounds.round(), "a", state(value), 1)
        rounds.close_round()
    rounds.forget(but=0)
    assert not old.exists()
    assert young.exists(), "its writer may still be at it"


def damage(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_a_damaged_state_is_left_out_of_the_mean_and_counted(rounds: Rounds, tmp_path: Path) -> None:
    rounds.put_state(0, "a", state(1.0), 100)
    rounds.put_state(0, "b", state(9.0), 100)
    damage(tmp_path / "rounds" / "state-00000000-b.safetensors")
    assert rounds.close_round() == 1
    assert rounds.base(1)["drafter/fc.weight"].tolist() == [1.0, 1.0]
    assert rounds.num_broken == 1
    rounds.put_state(1, "a", state(1.0), 100)
    damage(tmp_path / "rounds" / "state-00000001-a.safetensors")
    assert rounds.close_round() == 1, "with no state that is whole there is no new base"
    assert rounds.fresh_tokens() == 0


def test_everybody_goes_on_from_the_base_before_a_damaged_one(rounds: Rounds) -> None:
    """A worker that cannot load the newest base would train for nothing from then on, or end again and again."""
    for value in (1.0, 2.0):
        rounds.put_state(rounds.round(), "a", state(value), 1)
        rounds.close_round()
    rounds.put_verdict(2, Verdict(publish=True, why="better", before=2.0, after=3.0))
    damage(rounds.file(2))
    with pytest.raises(FileNotFoundError):
        rounds.base(2)
    assert rounds.round() == 1
    assert rounds.verdict(2) is None, "it is not the verdict of the next base 2"
    assert rounds.base(1)["drafter/fc.weight"].tolist() == [1.0, 1.0]


def test_a_damaged_base_is_not_sent_and_ends_nothing(rounds: Rounds) -> None:
    class NoSender:
        async def send_drafter(self, file: Path, version: int) -> NoReturn:
            pytest.fail("sent")

    rounds.put_state(0, "a", state(1.0), 1)
    rounds.close_round()
    damage(rounds.file(1))
    (receipt,) = asyncio.run(cast("Any", RoundSender(cast("Any", NoSender()), rounds).send_drafter(1)))
    assert not receipt.ok and not receipt.lost
    assert "checksum" in str(receipt.error)


def test_verdicts_and_progress_survive_their_writer(rounds: Rounds) -> None:
    assert rounds.verdict(1) is None and rounds.progress("a") == Progress()
    rounds.put_verdict(1, Verdict(publish=True, why="better", before=2.0, after=3.0))
    rounds.put_progress("a", Progress(training_s=1.5, num_tokens=10))
    assert rounds.verdict(1) == Verdict(publish=True, why="better", before=2.0, after=3.0)
    assert rounds.progress("a") == Progress(training_s=1.5, num_tokens=10)


def test_a_resumed_run_trains_on_from_the_newest_base_and_has_the_published_one(rounds: Rounds, tmp_path: Path) -> None:
    for value in (1.0, 2.0, 3.0):
        rounds.put_state(rounds.round(), "a", state(value), 1)
        rounds.close_round()
    rounds.put_state(3, "a", state(9.0), 1)
    rounds.publish(2)
    found = Verdict(publish=True, why="better", before=1.0, after=2.0)
    rounds.put_verdict(3, found)
    rounds.put_progress("a", Progress(num_tokens=77))
    rounds.copy_to(tmp_path / "kept")

    again = Rounds(tmp_path / "rounds-again", tmp_path / "checkpoint")
    again.copy_from(tmp_path / "kept")
    assert (again.round(), again.published(), again.verdict(3)) == (3, 2, found)
    assert again.base(3)["optimizer/0/0/exp_avg"].tolist() == [30.0, 30.0]
    assert again.base(2)["drafter/fc.weight"].tolist() == [2.0, 2.0]
    assert again.progress("a").num_tokens == 77
    begun, tokens = again.state(3, "a")
    assert begun["drafter/fc.weight"].tolist() == [9.0, 9.0] and tokens == again.fresh_tokens() == 1
    begun, tokens = again.state(3, "b")
    assert begun["drafter/fc.weight"].tolist() == [3.0, 3.0] and tokens == 0, "a new worker begins at the base"


def test_a_run_whose_drafter_was_never_trained_can_be_resumed(rounds: Rounds, tmp_path: Path) -> None:
    rounds.copy_to(tmp_path / "kept")
    rounds.copy_from(tmp_path / "kept")
    assert (rounds.round(), rounds.published()) == (0, 0)
