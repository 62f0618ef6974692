"""Checkpoints while the drafter is trained: what they hold, that they are whole, and that the writer stops nothing."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from drafter_cases import KINDS, make_documents, make_drafter, make_head
from paceline.drafters import saver as saver_module
from paceline.drafters.checkpoint import load, save
from paceline.drafters.saver import Saver, restore, write
from paceline.drafters.trainer import DrafterTrainer, Schedule, trained

SCHEDULE = Schedule(num_steps=None, tokens_per_step=25, draft_length=2, warmup_steps=1, autocast=False)


def trained_drafter(kind: str, start: Path) -> DrafterTrainer:
    """One that began from the checkpoint `start` and has moved away from it."""
    save(make_drafter(kind), start)
    trainer = DrafterTrainer(load(start), make_head(), SCHEDULE)
    trainer.submit(make_documents([(3, 9), (4, 7)]))
    trainer.run(lambda: False)
    return trainer


@pytest.mark.parametrize("kind", KINDS)
def test_the_file_and_the_original_directory_make_the_whole_drafter_again(kind: str, tmp_path: Path) -> None:
    """A trainable tensor that is left out would come back as it was before training, and nobody would see it."""
    trainer = trained_drafter(kind, tmp_path / "start")
    saver = Saver(tmp_path / "run" / "trained.safetensors")
    saver.save(trained(trainer.drafter), step=trainer.num_steps)
    saver.close()
    drafter = load(tmp_path / "start")
    assert any(not torch.equal(weight, drafter.state_dict()[name]) for name, weight in trained(trainer.drafter).items())
    assert restore(drafter, saver.file) == trainer.num_steps == 1
    whole = trainer.drafter.state_dict()
    restored = drafter.state_dict()
    assert whole.keys() == restored.keys()
    assert all(
        torch.equal(weight, restored[name]) for name, weight in whole.items() if not name.startswith("verifier_")
    )
    assert [file.name for file in saver.file.parent.iterdir()] == ["trained.safetensors"], (
        "nothing half-written is left"
    )


def test_training_may_change_the_weights_as_soon_as_save_returns(tmp_path: Path) -> None:
    """Without a copy, a file would hold half of one step and half of the next."""
    weight = torch.arange(4.0)
    saver = Saver(tmp_path / "w.safetensors")
    with saver._changed:  # the writer cannot begin
        saver.save({"w": weight}, step=1)
        weight.zero_()
    saver.close()
    with saver_module.safe_open(saver.file, "pt") as tensors:
        assert tensors.get_tensor("w").tolist() == [0, 1, 2, 3]


class SlowDisk:
    """`write` that waits to be let go, and keeps what it was asked for."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.begun = threading.Semaphore(0)
        self.go = threading.Semaphore(0)

    def write(self, file: Path, weights: object, *, step: int) -> None:
        del file, weights
        self.steps.append(step)
        self.begun.release()
        assert self.go.acquire(timeout=10)


def test_the_newest_wins_while_one_is_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue would grow without end behind a slow disk, and end with a file that is long out of date."""
    disk = SlowDisk()
    monkeypatch.setattr(saver_module, "write", disk.write)
    saver = Saver(tmp_path / "w.safetensors")
    saver.save({"w": torch.zeros(1)}, step=1)
    assert disk.begun.acquire(timeout=10)
    for step in (2, 3, 4):  # none of these waits for the disk
        saver.save({"w": torch.zeros(1)}, step=step)
    disk.go.release(2)
    saver.flush()
    saver.close()
    counts = saver.counts()
    assert disk.steps == [1, 4]
    assert (counts.num_saved, counts.num_written, counts.num_replaced, counts.num_failed) == (4, 2, 2, 0)


def test_a_writer_that_fails_is_counted_and_says_why_and_the_next_one_writes(tmp_path: Path) -> None:
    """An exception that ended the thread would leave a run without checkpoints and without a word."""
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where a directory should be")
    saver = Saver(blocked / "w.safetensors")
    saver.save({"w": torch.zeros(1)}, step=1)
    saver.flush()
    assert saver.counts().metrics()["draft/checkpoints_failed"] == 1
    assert saver.last_error is not None and "w.safetensors" in saver.last_error
    blocked.unlink()
    saver.save({"w": torch.zeros(1)}, step=2)
    saver.close()
    assert saver.counts().num_written == 1 and saver.file.is_file()


def test_a_write_that_dies_leaves_the_last_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "w.safetensors"
    write(file, {"w": torch.ones(2)}, step=1)
    before = file.read_bytes()

    def half(weights: object, path: Path, metadata: object) -> None:
        del weights, metadata
        path.write_bytes(before[: len(before) // 2])
        raise OSError("no space left")

    monkeypatch.setattr(saver_module, "save_file", half)
    with pytest.raises(OSError, match="no space"):
        write(file, {"w": torch.zeros(2)}, step=2)
    assert file.read_bytes() == before


def test_a_flipped_byte_is_refused(tmp_path: Path) -> None:
    trainer = trained_drafter("eagle3", tmp_path / "start")
    file = tmp_path / "trained.safetensors"
    write(file, trained(trainer.drafter), step=1)
    damaged = bytearray(file.read_bytes())
    damaged[-5] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(ValueError, match="checksum"):
        restore(load(tmp_path / "start"), file)


def test_a_file_of_another_drafter_is_refused_by_name(tmp_path: Path) -> None:
    trainer = trained_drafter("eagle3", tmp_path / "start")
    file = tmp_path / "trained.safetensors"
    write(file, {name: weight for name, weight in trained(trainer.drafter).items() if name != "fc.weight"}, step=1)
    with pytest.raises(ValueError, match=r"fc\.weight"):
        restore(load(tmp_path / "start"), file)
