"""Faults of the store of checkpoints: writers that are killed while they write, and bits that flip on the disk."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

from paceline.files import ChecksumError
from paceline.orchestrator.store import Store, seal, verify

Write = Callable[[Path, int], None]


def count_unreadable(directory: Path, num_kills: int, *, naive: bool = False, seed: int = 1) -> int:
    """Kill writers at random moments; returns after how many kills the newest checkpoint could not be read, or one that
    was there had gone. `naive` writers write under the final name, which is the control."""
    rng, write = random.Random(seed), _write_in_place if naive else _write  # noqa: S311  moments, no secrets
    began_s = time.monotonic()
    _write(directory, 1)
    write_s = time.monotonic() - began_s
    newest, num_unreadable = 1, 0
    for _ in range(num_kills):
        child = os.fork()
        if child == 0:
            _write_for_ever(write, directory, newest)
        time.sleep(rng.uniform(0, 4 * write_s + 0.02))  # the moment of the kill is what is drawn
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        store = Store(directory)
        found, problems = store.newest()
        if found is None or problems or found.step < newest:
            num_unreadable += 1
        newest = newest if found is None else found.step
        store.tidy()
    assert newest > 1, "no writer came far enough, so the kills say nothing"
    return num_unreadable


def count_missed_flips(directory: Path, num_flips: int, *, seed: int = 0) -> int:
    """Flip single bits of a checkpoint, one at a time, and count those that loading does not find."""
    _write(directory, 7)
    (path,) = directory.glob("step-*")
    assert verify(path).step == 7, "a whole checkpoint is read"
    files = [file for file in sorted(path.rglob("*")) if file.is_file()]
    rng, num_missed = random.Random(seed), 0  # noqa: S311
    for number in range(num_flips):
        file = files[number % len(files)]
        whole = file.read_bytes()
        place, bit = rng.randrange(len(whole)), rng.randrange(8)
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
        try:
            verify(path)
            num_missed += 1
        except ChecksumError:
            pass
        file.write_bytes(whole)
    return num_missed


def _fill(directory: Path, step: int) -> None:
    (directory / "learner").mkdir()
    (directory / "run.json").write_text(json.dumps({"step": step}), encoding="utf-8")
    for part in range(3):
        (directory / "learner" / f"shard-{part}.safetensors").write_bytes(bytes([step % 256]) * 20_000)


def _write(directory: Path, step: int) -> None:
    with Store(directory).writing(step, {}) as partial:
        _fill(partial, step)


def _write_in_place(directory: Path, step: int) -> None:
    path = directory / f"step-{step:08d}"
    path.mkdir()
    _fill(path, step)
    seal(path, step, {})


def _write_for_ever(write: Write, directory: Path, step: int) -> None:
    while True:
        step += 1
        write(directory, step)
