"""Checkpoints of a run as files: each is written whole or not at all, is verified when it is loaded, and two are kept.

    state/step-00000020/manifest.json     SHA-256 of every other file, facts about the run, and its own checksum
                        run.json, learner/, drafter/
          .step-00000030.*.partial        being written; a killed writer leaves it, and the next run removes it
          broken-step-00000010            did not verify: kept for whoever wants to know why

A checkpoint gets its name by a rename, after the disk has all of it, so a name stands for a complete directory whatever
was killed when. Nothing in it names the directory that it is in: a run that was moved can go on. Formats are JSON and
safetensors, so loading runs no code of whoever wrote it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.files import (
    atomic_directory,
    move_file,
    private_directory,
    remove_directory,
    remove_partials,
    sha256,
    sha256_of,
)
from paceline.types import PacelineError

KEPT = 2
"""Checkpoints that are kept: the newest, and the one before it in case the newest is damaged."""
_FORMAT = 1
_MANIFEST = "manifest.json"
_PREFIX = "step-"
_BROKEN = "broken-"


class BrokenCheckpointError(PacelineError):
    """A checkpoint is not what was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint that was verified."""

    step: int
    path: Path
    facts: Mapping[str, Any]
    """What its writer noted about the run."""


class Store:
    """The directory of checkpoints of one run. One process writes to it."""

    def __init__(self, directory: Path) -> None:
        self._directory = private_directory(directory)

    def tidy(self) -> None:
        """Remove what killed writers left; the caller knows that no other writer is alive."""
        remove_partials(self._directory)

    @contextmanager
    def writing(self, step: int, facts: Mapping[str, Any]) -> Iterator[Path]:
        """Yield a directory to fill. It becomes the checkpoint of this step when the block ends, which reads every file
        once for its checksum and waits for the disk; older ones are then removed."""
        with atomic_directory(self._path(step), durable=True) as partial:
            yield partial
            seal(partial, step, facts)
        for old in self.steps()[:-KEPT]:
            remove_directory(self._path(old))

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, whole or damaged, in order."""
        names = [entry.name.removeprefix(_PREFIX) for entry in self._directory.glob(f"{_PREFIX}*")]
        return sorted(int(name) for name in names if name.isdecimal())

    def newest(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest checkpoint that verifies, and what is wrong with those that are newer, which are set aside."""
        problems: list[str] = []
        for step in reversed(self.steps()):
            try:
                return verify(self._path(step)), problems
            except BrokenCheckpointError as problem:
                problems.append(str(problem))
                aside = self._directory / f"{_BROKEN}{_PREFIX}{step:08d}"
                if aside.exists():
                    remove_directory(aside)
                move_file(self._path(step), aside)
        return None, problems

    def _path(self, step: int) -> Path:
        return self._directory / f"{_PREFIX}{step:08d}"


def verify(path: Path) -> Checkpoint:
    """Read all of a checkpoint and compare it with its manifest; whatever differs raises BrokenCheckpointError."""
    try:
        written = (path / _MANIFEST).read_bytes()
        manifest = json.loads(written)
        files, step, facts = manifest["files"], manifest["step"], manifest["facts"]
        same = written == _encoded(manifest) and manifest["format"] == _FORMAT
        same = same and manifest["sha256"] == _own_checksum(manifest)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise BrokenCheckpointError(f"{path.name}: its {_MANIFEST} cannot be read ({error!r})") from None
    if not same:
        raise BrokenCheckpointError(f"{path.name}: its {_MANIFEST} differs from what was written")
    for name, checksum in files.items():
        try:
            found = sha256(path / name)
        except OSError as error:
            raise BrokenCheckpointError(f"{path.name}: {name} cannot be read ({error.strerror})") from None
        if found != checksum:
            raise BrokenCheckpointError(f"{path.name}: {name} differs from its checksum")
    return Checkpoint(step=step, path=path, facts=facts)


def seal(partial: Path, step: int, facts: Mapping[str, Any]) -> None:
    """Write the manifest, and let nobody but the owner read: rollouts and weights are the owner's."""
    files: dict[str, str] = {}
    for entry in sorted(partial.rglob("*")):
        entry.chmod(0o700 if entry.is_dir() else 0o600)
        if entry.is_file():
            files[entry.relative_to(partial).as_posix()] = sha256(entry)
    manifest: dict[str, Any] = {"format": _FORMAT, "step": step, "facts": dict(facts), "files": files}
    manifest["sha256"] = _own_checksum(manifest)
    (partial / _MANIFEST).write_bytes(_encoded(manifest))
    (partial / _MANIFEST).chmod(0o600)
    partial.chmod(0o700)


def _encoded(manifest: Mapping[str, Any]) -> bytes:
    return (json.dumps(manifest, indent=1, sort_keys=True) + "\n").encode()


def _own_checksum(manifest: Mapping[str, Any]) -> str:
    return sha256_of([_encoded({key: value for key, value in manifest.items() if key != "sha256"})])
