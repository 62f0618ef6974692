"""Rounds of drafter training: workers and the run exchange the drafter's weights through a directory.

    base-r ──load──▶ each worker trains ──▶ state-r-WORKER   written after every slice, with its tokens since base-r
                                               │ close_round: averaged, weighted by tokens seen
    base-(r+1) ◀───────────────────────────────┘
       │ the first worker that comes to it compares it with the published one on the held-out slice
       ▼
    verdict-(r+1) ──▶ published in the engines, or not

Base 0 is the drafter's checkpoint, which everybody has. A worker may be stopped or killed between any two instructions,
so nobody waits for its answer: it reports through files, each of which is moved into place when it is whole. What a
killed worker had not written yet is lost, and nothing else. The files can be read by their owner only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from paceline.drafters.drift import Verdict
from paceline.drafters.trainer import WEIGHTS, State, average
from paceline.files import atomic_file, move_file, private_directory


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What the workers of one slot have done since the run began."""

    training_s: float = 0.0
    """Time spent on slices and evaluations, without the time in which a worker was stopped."""
    num_tokens: int = 0
    num_skipped: int = 0
    """Optimizer steps whose gradient was not finite."""
    num_broken_files: int = 0
    """Times that a file of the buffer was there and could not be read."""
    overlap: float = 0.0
    """Overlap of the last slice, over all unrolled steps."""


class Rounds:
    """One process's access to the directory. Only one process closes rounds; any may do the rest."""

    def __init__(self, directory: Path, checkpoint: Path) -> None:
        self._directory = directory
        self._checkpoint = checkpoint
        private_directory(directory)

    def round(self) -> int:
        """Number of the newest base."""
        return max((_round(file) for file in self._directory.glob("base-*.safetensors")), default=0)

    def base(self, number: int) -> State:
        """Load a base; raises FileNotFoundError for one that was forgotten. Base 0 has no optimizer state."""
        if number:
            return load_file(self.file(number))
        return {f"{WEIGHTS}{name}": tensor for name, tensor in load_file(self.file(0)).items()}

    def file(self, number: int) -> Path:
        """File of a base, for `drafter_weights`."""
        return self._directory / f"base-{number:08d}.safetensors" if number else self._checkpoint / "model.safetensors"

    def put_state(self, number: int, worker: str, state: State, fresh_tokens: int) -> None:
        """Write what a worker has made of a base so far; one that has trained on nothing writes nothing."""
        file = self._directory / f"state-{number:08d}-{worker}.safetensors"
        if fresh_tokens:
            _write_tensors(file, state, {"fresh_tokens": str(fresh_tokens)})

    def fresh_tokens(self) -> int:
        """Tokens that all workers together have trained on in the present round."""
        return sum(tokens for _, tokens in self._states(self.round()))

    def close_round(self) -> int:
        """Average the workers' states into the next base, remove them, and return the number of that base."""
        number = self.round()
        states = list(self._states(number))
        assert states, "a round without training has nothing to close"
        if len(states) == 1:
            move_file(states[0][0], self.file(number + 1))  # it is whole already
        else:
            mean = average([load_file(file) for file, _ in states], [tokens for _, tokens in states])
            _write_tensors(self.file(number + 1), mean, {})
            for file, _ in states:
                file.unlink(missing_ok=True)
        return number + 1

    def forget(self, *, but: int) -> None:
        """Remove everything older than the newest base, except base `but`, which is the published one."""
        newest = self.round()
        for file in self._directory.iterdir():
            kind = file.name.lstrip(".").split("-")[0]
            if kind not in ("base", "state", "verdict") or (kind, _round(file)) == ("base", but):
                continue
            # A partial file that old was left by a killed worker; a worker that lags may still write a younger one.
            if _round(file) < (newest - 2 if file.name.startswith(".") else newest):
                file.unlink(missing_ok=True)

    def revert(self, to: int) -> int:
        """Make an older base the newest one again; returns the number that it has now."""
        number = self.round() + 1
        _write_tensors(self.file(number), self.base(to), {})
        return number

    def put_verdict(self, number: int, verdict: Verdict) -> None:
        _write_json(self._directory / f"verdict-{number:08d}.json", asdict(verdict))

    def verdict(self, number: int) -> Verdict | None:
        tree = _read_json(self._directory / f"verdict-{number:08d}.json")
        return None if tree is None else Verdict(**tree)

    def publish(self, number: int) -> None:
        """Record which base is in the engines: a verdict compares with it."""
        _write_json(self._directory / "published.json", {"round": number})

    def published(self) -> int:
        return (_read_json(self._directory / "published.json") or {"round": 0})["round"]

    def put_progress(self, worker: str, progress: Progress) -> None:
        _write_json(self._directory / f"progress-{worker}.json", asdict(progress))

    def progress(self, worker: str) -> Progress:
        tree = _read_json(self._directory / f"progress-{worker}.json")
        return Progress() if tree is None else Progress(**tree)

    def _states(self, number: int) -> Iterator[tuple[Path, int]]:
        for file in sorted(self._directory.glob(f"state-{number:08d}-*.safetensors")):
            with safe_open(file, "pt") as tensors:
                yield file, int(tensors.metadata()["fresh_tokens"])


def drafter_weights(file: Path) -> dict[str, torch.Tensor]:
    """Load the drafter's tensors from a base or a checkpoint, under the names of the checkpoint."""
    with safe_open(file, "pt") as tensors:
        names = list(tensors.keys())
        own = [name for name in names if name.startswith(WEIGHTS)] or names
        return {name.removeprefix(WEIGHTS): tensors.get_tensor(name) for name in own}


def _round(file: Path) -> int:
    return int(file.name.split("-")[1].split(".")[0])


def _write_tensors(file: Path, tensors: State, metadata: dict[str, str]) -> None:
    with atomic_file(file, private=True) as partial:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial, metadata=metadata)


def _write_json(file: Path, tree: dict[str, Any]) -> None:
    with atomic_file(file, private=True) as partial:
        partial.write_text(json.dumps(tree), encoding="utf-8")


def _read_json(file: Path) -> dict[str, Any] | None:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
