"""A flipped bit is found in every kind of file that a run writes and reads again, whichever bit it is.

`PACELINE_FLIPS=1000 pytest tests/unit/drafters/test_damage.py` plants as many in each kind; without it a few.
"""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from contexts import make_context
from drafter_cases import make_documents, make_drafter, make_head
from paceline.config import BufferConfig
from paceline.drafters.buffer import Buffer
from paceline.drafters.checkpoint import read_parts, save
from paceline.drafters.drift import Verdict
from paceline.drafters.history import Record
from paceline.drafters.history_exchange import decode, encode
from paceline.drafters.rounds import Progress, Rounds, drafter_weights
from paceline.drafters.saver import restore, write
from paceline.drafters.trainer import trained
from paceline.files import ChecksumError
from paceline.learner.checkpoint import write_checkpoint
from paceline.sessions.workloads import resolve_policy

NUM_FLIPS = int(os.environ.get("PACELINE_FLIPS", "24"))

Finds = Callable[[], bool]
"""Loads what was written; whether it noticed that something is wrong."""
Case = tuple[list[Path], Finds]


def refuses(load: Callable[[], object], error: type[Exception] = ChecksumError) -> Finds:
    def found() -> bool:
        try:
            load()
        except error:
            return True
        return False

    return found


def policy(directory: Path) -> Case:
    source = directory / "source"
    source.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (source / name).write_text(json.dumps({"name": name}))
    target = directory / "policy" / "step-7"
    write_checkpoint(target, source, {"w": torch.randn(32, 8)}, torch.float32)
    return sorted(target.iterdir()), refuses(lambda: resolve_policy(str(target), make_context()))


def drafter(directory: Path) -> Case:
    save(make_drafter(), directory / "drafter")
    files = sorted((directory / "drafter").iterdir())
    # A damaged config.json is no JSON, or names another kind, before checksums are looked at: told as well.
    return files, refuses(lambda: read_parts(directory / "drafter", "eagle3", who="drafter"), ValueError)


def saved(directory: Path) -> Case:
    own = make_drafter()
    write(directory / "drafter.safetensors", trained(own), step=3)
    return [directory / "drafter.safetensors"], refuses(
        lambda: restore(own, directory / "drafter.safetensors"), ValueError
    )


def rounds_in(directory: Path) -> Rounds:
    (directory / "checkpoint").mkdir(exist_ok=True)
    save_file({"fc.weight": torch.zeros(8)}, directory / "checkpoint" / "model.safetensors")
    return Rounds(directory / "rounds", directory / "checkpoint")


def state() -> dict[str, torch.Tensor]:
    return {"drafter/fc.weight": torch.randn(64), "optimizer/0/0/exp_avg": torch.randn(64)}


def base(directory: Path) -> Case:
    rounds = rounds_in(directory)
    rounds.put_state(0, "a", state(), 10)
    rounds.close_round()
    return [rounds.file(1)], refuses(lambda: rounds.base(1), FileNotFoundError)


def pushed_base(directory: Path) -> Case:
    files, _ = base(directory)
    return files, refuses(lambda: drafter_weights(files[0]))


def counts(directory: Path, load: Callable[[Rounds], object]) -> Finds:
    def found() -> bool:
        rounds = rounds_in(directory)
        load(rounds)
        return rounds.num_broken > 0

    return found


def worker_state(directory: Path) -> Case:
    def close(rounds: Rounds) -> None:
        rounds.close_round()
        for file in (directory / "rounds").glob("base-*"):
            file.unlink()

    rounds = rounds_in(directory)
    rounds.put_state(0, "a", state(), 10)
    rounds.put_state(0, "b", state(), 10)
    return [directory / "rounds" / "state-00000000-a.safetensors"], counts(directory, close)


def verdict(directory: Path) -> Case:
    rounds_in(directory).put_verdict(1, Verdict(publish=True, why="better", before=2.0, after=3.0))
    file = directory / "rounds" / "verdict-00000001.json"
    return [file], counts(directory, lambda rounds: rounds.verdict(1))


def progress(directory: Path) -> Case:
    rounds_in(directory).put_progress("a", Progress(training_s=1.5, num_tokens=10))
    file = directory / "rounds" / "progress-a.json"
    return [file], counts(directory, lambda rounds: rounds.progress("a"))


def published(directory: Path) -> Case:
    rounds_in(directory).publish(3)
    return [directory / "rounds" / "published.json"], refuses(lambda: rounds_in(directory).published())


def document(directory: Path) -> Case:
    config = BufferConfig(heldout_share=1e-6)
    buffer = Buffer(directory / "documents", config, writer="rank0")
    buffer.put(make_documents([(3, 9)]), 1)
    (entry,) = buffer.entries()
    return [entry.file], lambda: not buffer.draw(10_000, np.random.default_rng(0))


def head(directory: Path) -> Case:
    Buffer(directory / "documents", BufferConfig(), writer="rank0").put_head(make_head().numpy(), 1)
    (file,) = (directory / "documents").iterdir()
    return [file], lambda: Buffer(directory / "documents", BufferConfig()).head() is None


def history(directory: Path) -> Case:
    file = directory / "1.rollouts"
    records = [Record(prompt=7, num_context=2, token_ids=np.arange(20, dtype=np.int32))]
    file.write_bytes(encode(records, 24))
    return [file], refuses(lambda: decode(file.read_bytes(), 24), ValueError)


CASES = (
    policy,
    drafter,
    saved,
    base,
    pushed_base,
    worker_state,
    verdict,
    progress,
    published,
    document,
    head,
    history,
)


@pytest.mark.parametrize("case", [policy, drafter, saved, base, document, head], ids=lambda case: case.__name__)
def test_a_write_that_finds_no_room_leaves_nothing(case: Callable[[Path], Case], tmp_path: Path) -> None:
    """A full disk must not stay full of halves. Files are cut at 600 bytes, as a full disk cuts them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, hard))
    try:
        with pytest.raises((OSError, SafetensorError)):
            case(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    left = [file for file in tmp_path.rglob("*") if file.is_file() and file.parent.name not in ("source", "checkpoint")]
    assert left == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_flipped_bit_is_found(case: Callable[[Path], Case], tmp_path: Path) -> None:
    files, finds = case(tmp_path)
    beside = [file for file in sorted(files[0].parent.iterdir()) if file.is_file()]  # what finding removes
    whole = {file: file.read_bytes() for file in beside}
    rng = np.random.default_rng(11)
    sizes = np.array([len(whole[file]) for file in files])
    missed = []
    for _ in range(NUM_FLIPS):
        # Half of them anywhere, half in a header: a header is small, and there the flips are that change a meaning.
        number = int(rng.choice(len(files), p=sizes / sizes.sum()))
        at = int(rng.integers(sizes[number] if rng.random() < 0.5 else min(256, sizes[number])))
        content = bytearray(whole[files[number]])
        content[at] ^= 1 << int(rng.integers(8))
        files[number].write_bytes(content)
        if not finds():
            missed.append((files[number].name, at, content[at]))
        for file, intact in whole.items():
            file.write_bytes(intact)
    assert missed == [], f"flips_missed {len(missed)} of {NUM_FLIPS}"
    assert not finds(), "what is whole must load"
