"""Rounds of drafter training: exchange of weights between workers and the run through a directory.

    base-r ──load──▶ each worker trains ──▶ state-r-WORKER   written after every slice, with its tokens since base-r
                                               │ close_round: averaged, weighted by tokens seen
    base-(r+1) ◀───────────────────────────────┘
       │ the first free worker compares it with the published one on held-out documents
       ▼
    verdict-(r+1) ──▶ published in the engines, or not

Base 0 is the drafter's checkpoint. A worker may be stopped or killed at any instruction; only unwritten work is lost.
Files are private and carry a checksum. Damaged files count as `num_broken` and are treated as missing.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from paceline.drafters.drift import Verdict
from paceline.drafters.trainer import WEIGHTS, State, average
from paceline.files import (
    SEAL,
    ChecksumError,
    atomic_file,
    move_file,
    private_directory,
    seal,
    verify_checksums,
    verify_seal,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Work of one slot's workers since the start of the run."""

    training_s: float = 0.0
    """Time spent on slices and evaluations, excluding stopped time."""
    num_tokens: int = 0
    num_skipped: int = 0
    """Optimizer steps whose gradient was not finite."""
    num_broken_files: int = 0
    """Failed reads of files of the buffer or of a round."""
    overlap: float = 0.0
    """Overlap of the last slice, over all unrolled steps."""
    finished_version: int = -1
    """Policy version for which all `inline_slices` are done."""


class Rounds:
    """One process's access to the directory. Only one process closes rounds."""

    def __init__(self, directory: Path, checkpoint: Path) -> None:
        self._directory, self._checkpoint = directory, checkpoint
        self._published: int | None = None
        self._progress: dict[str, Progress] = {}
        self.num_broken = 0
        """Failed reads."""
        private_directory(directory)

    def round(self) -> int:
        """Return the number of the newest base."""
        return max((_round(file) for file in self._directory.glob("base-*.safetensors")), default=0)

    def base(self, number: int) -> State:
        """Load a base; raise FileNotFoundError if it was removed. Base 0 has no optimizer state.

        Remove a damaged base, so that all workers continue from the one before, and raise FileNotFoundError too.
        """
        if not number:
            verify_checksums(self._checkpoint)
            return {f"{WEIGHTS}{name}": tensor for name, tensor in load_file(self.file(0)).items()}
        if not self._is_whole(self.file(number)):
            self._verdict_file(number).unlink(missing_ok=True)
            raise FileNotFoundError(f"{self.file(number)} was damaged")
        return load_file(self.file(number))

    def file(self, number: int) -> Path:
        """Return the file of a base, for `drafter_weights`."""
        return self._directory / f"base-{number:08d}.safetensors" if number else self._checkpoint / "model.safetensors"

    def put_state(self, number: int, worker: str, state: State, fresh_tokens: int) -> None:
        """Write a worker's state of a base, unless it has no tokens."""
        if fresh_tokens:
            _write_tensors(self._state_file(number, worker), state, {"fresh_tokens": str(fresh_tokens)})

    def state(self, number: int, worker: str) -> tuple[State, int]:
        """Return a worker's state of a base and its tokens, or the base and 0. Raise FileNotFoundError like `base`."""
        file = self._state_file(number, worker)
        with suppress(FileNotFoundError):
            if self._is_whole(file) and (tokens := _fresh_tokens(file)):
                return load_file(file), tokens
        return self.base(number), 0

    def fresh_tokens(self) -> int:
        """Return the tokens of all workers in the current round."""
        return sum(tokens for _, tokens in self._states(self.round()))

    def close_round(self) -> int:
        """Average the workers' states into the next base, remove them, and return its number; return the current one
        if no state is intact."""
        number = self.round()
        states = list(self._states(number))
        assert states, "a round without training has nothing to close"
        states = [(file, tokens) for file, tokens in states if self._is_whole(file)]
        if not states:
            return number
        if len(states) == 1:
            move_file(states[0][0], self.file(number + 1))  # already verified
        else:
            mean = average([load_file(file) for file, _ in states], [tokens for _, tokens in states])
            _write_tensors(self.file(number + 1), mean, {})
            for file, _ in states:
                file.unlink(missing_ok=True)
        return number + 1

    def forget(self, *, but: int) -> None:
        """Remove everything older than the newest base, except the published base `but`."""
        newest = self.round()
        for file in self._directory.iterdir():
            kind = file.name.lstrip(".").split("-")[0]
            if kind not in ("base", "state", "verdict") or (kind, _round(file)) == ("base", but):
                continue
            # Older partial files are from killed workers; a slow worker may still write newer ones.
            if _round(file) < (newest - 2 if file.name.startswith(".") else newest):
                file.unlink(missing_ok=True)

    def revert(self, to: int) -> int:
        """Copy an older base to a new newest base and return its number."""
        number = self.round() + 1
        _write_tensors(self.file(number), self.base(to), {})
        return number

    def put_verdict(self, number: int, verdict: Verdict) -> None:
        _write_json(self._verdict_file(number), asdict(verdict))

    def verdict(self, number: int) -> Verdict | None:
        tree = self._read_json(self._verdict_file(number))
        return None if tree is None else Verdict(**tree)

    def publish(self, number: int) -> None:
        """Record the base in the engines, with which verdicts compare."""
        self._published = number
        _write_json(self._directory / "published.json", {"round": number})

    def published(self) -> int:
        """Return the number of the base in the engines; raise ChecksumError if the record is damaged."""
        if self._published is not None:  # in the process that publishes
            return self._published
        file = self._directory / "published.json"
        if not file.is_file():
            return 0
        verify_seal(file)
        return json.loads(file.read_text(encoding="utf-8"))["round"]

    def copy_to(self, directory: Path) -> None:
        """Copy the newest and the published base, the workers' states of the newest, verdicts and progress."""
        directory.mkdir()
        newest = self.round()
        bases = {self.file(number).name for number in (newest, self.published()) if number}
        known = (f"state-{newest:08d}-", "verdict-", "progress-", "published")
        for file in self._directory.iterdir():
            if file.name in bases or file.name.startswith(known):
                shutil.copyfile(file, directory / file.name)

    def copy_from(self, directory: Path) -> None:
        for source in directory.iterdir():
            with atomic_file(self._directory / source.name, private=True) as partial:
                shutil.copyfile(source, partial)

    def put_progress(self, worker: str, progress: Progress) -> None:
        _write_json(self._directory / f"progress-{worker}.json", asdict(progress))

    def progress(self, worker: str) -> Progress:
        tree = self._read_json(self._directory / f"progress-{worker}.json")
        if tree is not None:
            self._progress[worker] = Progress(**tree)
        return self._progress.get(worker, Progress())

    def _states(self, number: int) -> Iterator[tuple[Path, int]]:
        for file in sorted(self._directory.glob(f"state-{number:08d}-*.safetensors")):
            tokens = _fresh_tokens(file)
            if tokens is None:
                self._is_whole(file)
            else:
                yield file, tokens

    def _state_file(self, number: int, worker: str) -> Path:
        return self._directory / f"state-{number:08d}-{worker}.safetensors"

    def _verdict_file(self, number: int) -> Path:
        return self._directory / f"verdict-{number:08d}.json"

    def _is_whole(self, file: Path) -> bool:
        """Return whether a file is intact. Count and remove a damaged one."""
        try:
            verify_seal(file)
        except ChecksumError:
            self.num_broken += 1
            file.unlink(missing_ok=True)
            return False
        return True

    def _read_json(self, file: Path) -> dict[str, Any] | None:
        """Read a file, or return None if it is missing or damaged."""
        with suppress(FileNotFoundError):
            if self._is_whole(file):
                tree = json.loads(file.read_text(encoding="utf-8"))
                return {key: value for key, value in tree.items() if key != "seal"}
        return None


def drafter_weights(file: Path) -> dict[str, torch.Tensor]:
    """Load the drafter's tensors from a base or a checkpoint, by their names in the checkpoint."""
    verify_weights(file)
    with safe_open(file, "pt") as tensors:
        names = list(tensors.keys())
        own = [name for name in names if name.startswith(WEIGHTS)] or names
        return {name.removeprefix(WEIGHTS): tensors.get_tensor(name) for name in own}


def verify_weights(file: Path) -> None:
    """Verify the checksum of a base or a checkpoint's file."""
    if file.name.startswith("base-"):
        verify_seal(file)
    else:
        verify_checksums(file.parent)


def _round(file: Path) -> int:
    return int(file.name.split("-")[1].split(".")[0])


def _fresh_tokens(file: Path) -> int | None:
    """Return the tokens of a state, or None if its header is damaged."""
    try:
        with safe_open(file, "pt") as tensors:
            return int(tensors.metadata()["fresh_tokens"])
    except (SafetensorError, LookupError, TypeError, ValueError):
        return None


def _write_tensors(file: Path, tensors: State, metadata: dict[str, str]) -> None:
    with atomic_file(file, private=True) as partial:
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, partial, metadata={"seal": SEAL, **metadata})
        seal(partial)


def _write_json(file: Path, tree: dict[str, Any]) -> None:
    with atomic_file(file, private=True) as partial:
        partial.write_text(json.dumps({"seal": SEAL, **tree}), encoding="utf-8")
        seal(partial)
