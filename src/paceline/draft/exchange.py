"""The drafter on its way between those who train it, in rounds, through a directory.

    base-r ──load──▶ each worker trains ──▶ state-r-WORKER        written after every slice, with the tokens seen since base-r
                                               │ close_round: by tokens seen, averaged
    base-(r+1) ◀───────────────────────────────┘
       │ the first worker that comes to it compares it with the published one on the held-out slice
       ▼
    verdict-(r+1) ──▶ published in the engines, or not

Base 0 is the drafter's checkpoint, which everybody has. A worker may be stopped or killed between any two instructions, so nobody
waits for an answer of one: all that it says is in files, each moved into place when it is whole. What a killed worker had not
written yet is lost, and nothing else.
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

from paceline.draft.drift import Verdict
from paceline.draft.trainer import WEIGHTS, State, average


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What one worker has done since it was started."""

    training_s: float = 0.0
    """In slices and judgements, not counting the time in which it was stopped."""
    num_tokens: int = 0
    num_skipped: int = 0
    """Optimizer steps whose gradient was not finite."""
    overlap: float = 0.0
    """Of the last slice, over all unrolled steps."""


class Exchange:
    """One process's access to the directory. One process closes rounds; any may do the rest."""

    def __init__(self, directory: Path, checkpoint: Path) -> None:
        self._directory = directory
        self._checkpoint = checkpoint
        directory.mkdir(parents=True, exist_ok=True)

    def round(self) -> int:
        """Of the newest base."""
        return max((_round(file) for file in self._directory.glob("base-*.safetensors")), default=0)

    def base(self, number: int) -> State:
        """Raises FileNotFoundError for one that was forgotten. Base 0 has no optimizer yet."""
        if number:
            return load_file(self.file(number))
        return {f"{WEIGHTS}{name}": tensor for name, tensor in load_file(self.file(0)).items()}

    def file(self, number: int) -> Path:
        """For `drafter_weights`."""
        return self._directory / f"base-{number:08d}.safetensors" if number else self._checkpoint / "model.safetensors"

    def put_state(self, number: int, worker: str, state: State, fresh_tokens: int) -> None:
        """What a worker has made of a base so far. One that has trained on nothing says nothing."""
        file = self._directory / f"state-{number:08d}-{worker}.safetensors"
        if fresh_tokens:
            _write_tensors(file, state, {"fresh_tokens": str(fresh_tokens)})

    def fresh_tokens(self) -> int:
        """Seen in the present round, by all workers together."""
        return sum(tokens for _, tokens in self._states(self.round()))

    def close_round(self) -> int:
        """Average what the workers have made of the newest base into the next; returns its number. Their files go."""
        number = self.round()
        states = list(self._states(number))
        assert states, "a round without training has nothing to close"
        if len(states) == 1:
            states[0][0].rename(self.file(number + 1))
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
            kind, *rest = file.name.split("-")
            if (
                kind in ("base", "state", "verdict")
                and rest
                and (number := _round(file)) < newest
                and (kind, number) != ("base", but)
            ):
                file.unlink(missing_ok=True)

    def revert(self, to: int) -> int:
        """Go on from an older base instead of the newest one; returns the number that it has now."""
        number = self.round() + 1
        _write_tensors(self.file(number), self.base(to), {})
        return number

    def put_verdict(self, number: int, verdict: Verdict) -> None:
        _write_json(self._directory / f"verdict-{number:08d}.json", asdict(verdict))

    def verdict(self, number: int) -> Verdict | None:
        tree = _read_json(self._directory / f"verdict-{number:08d}.json")
        return None if tree is None else Verdict(**tree)

    def publish(self, number: int) -> None:
        """Note which base is in the engines: a verdict compares with it."""
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
    """The drafter's tensors in a base or in a checkpoint, by the names of the checkpoint."""
    with safe_open(file, "pt") as tensors:
        names = list(tensors.keys())
        own = [name for name in names if name.startswith(WEIGHTS)] or names
        return {name.removeprefix(WEIGHTS): tensors.get_tensor(name) for name in own}


def _round(file: Path) -> int:
    return int(file.name.split("-")[1].split(".")[0])


def _write_tensors(file: Path, tensors: State, metadata: dict[str, str]) -> None:
    beside = file.with_name(f".{file.name}")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, beside, metadata=metadata)
    beside.replace(file)


def _write_json(file: Path, tree: dict[str, Any]) -> None:
    beside = file.with_name(f".{file.name}")
    beside.write_text(json.dumps(tree), encoding="utf-8")
    beside.replace(file)


def _read_json(file: Path) -> dict[str, Any] | None:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
