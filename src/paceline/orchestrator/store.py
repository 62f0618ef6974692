"""Checkpoints of a run as directories. Each is complete or absent, and is verified when it is loaded.

    state/step-00000020/manifest.json, SHA256SUMS, run.json, learner/, drafter/
          .step-00000030.*.partial        incomplete; the next run removes leftovers of a killed writer
          broken-step-00000010            failed verification; kept for inspection

A checkpoint is renamed to its final name after its content has reached the disk, so the name implies a complete
directory. Files contain no absolute paths, so a run can be moved. All formats are JSON and safetensors, which load
without running code.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.files import (
    CHECKSUM_FILE,
    ChecksumError,
    atomic_directory,
    move_file,
    private_directory,
    remove_directory,
    remove_partials,
    verify_checksums,
    write_checksums,
)

KEPT = 2
"""Number of checkpoints to keep: the newest, and the previous one in case the newest is damaged."""
_FORMAT = 2
_MANIFEST = "manifest.json"
_PREFIX = "step-"
_BROKEN = "broken-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A verified checkpoint."""

    step: int
    path: Path
    facts: Mapping[str, Any]
    """Properties of the run that the writer recorded."""


class Store:
    """The directory of checkpoints of one run. It supports a single writer."""

    def __init__(self, directory: Path) -> None:
        self._directory = private_directory(directory)

    def tidy(self) -> None:
        """Remove partial checkpoints of killed writers. No other writer may be alive."""
        remove_partials(self._directory)

    @contextmanager
    def writing(self, step: int, facts: Mapping[str, Any]) -> Generator[Path]:
        """Yield a directory to fill. When the block ends, it is checksummed, synced to disk and renamed to the
        checkpoint of this step; older checkpoints are then removed."""
        with atomic_directory(self._path(step), durable=True) as partial:
            yield partial
            seal(partial, step, facts)
        for old in self.steps()[:-KEPT]:
            remove_directory(self._path(old))

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, damaged ones included, in order."""
        names = [entry.name.removeprefix(_PREFIX) for entry in self._directory.glob(f"{_PREFIX}*")]
        return sorted(int(name) for name in names if name.isdecimal())

    def newest(self) -> tuple[Checkpoint | None, list[str]]:
        """Return the newest checkpoint that verifies, and the problems of newer ones, which are set aside."""
        problems: list[str] = []
        for step in reversed(self.steps()):
            try:
                return verify(self._path(step)), problems
            except ChecksumError as problem:
                problems.append(str(problem))
                aside = self._directory / f"{_BROKEN}{_PREFIX}{step:08d}"
                if aside.exists():
                    remove_directory(aside)
                move_file(self._path(step), aside)
        return None, problems

    def _path(self, step: int) -> Path:
        return self._directory / f"{_PREFIX}{step:08d}"


def verify(path: Path) -> Checkpoint:
    """Read a checkpoint and compare every file with its checksum; raise ChecksumError at the first difference."""
    try:
        if not verify_checksums(path, complete=True):
            raise ChecksumError(f"{path / CHECKSUM_FILE} is missing")
        manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
    except OSError as error:
        raise ChecksumError(f"{path} cannot be read: {error}") from None
    if manifest["format"] != _FORMAT:
        raise ChecksumError(f"{path} has format {manifest['format']}; must be {_FORMAT}, as this version writes")
    return Checkpoint(step=manifest["step"], path=path, facts=manifest["facts"])


def seal(partial: Path, step: int, facts: Mapping[str, Any]) -> None:
    """Write the manifest and SHA256SUMS, and restrict access to the owner: rollouts and weights are private."""
    manifest = {"format": _FORMAT, "step": step, "facts": dict(facts)}
    (partial / _MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    write_checksums(partial)
    for entry in (partial, *partial.rglob("*")):
        entry.chmod(0o700 if entry.is_dir() else 0o600)
