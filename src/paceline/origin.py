"""What a file or a figure was made from and with: SHA-256 of files, versions of packages."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_WEIGHTS = "model.safetensors"
CHECKSUM_FILE = f"{_WEIGHTS}.sha256"
"""Beside the weights, in the format of `sha256sum`: safetensors itself loads a flipped byte without a word."""


def sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_checksum(directory: Path, *, copied_from: Path | None = None) -> None:
    """Of a copy the original's, so that a copy that went wrong is found."""
    (directory / CHECKSUM_FILE).write_text(f"{sha256((copied_from or directory) / _WEIGHTS)}  {_WEIGHTS}\n", encoding="utf-8")


def is_as_written(directory: Path) -> bool | None:
    """Whether the weights have their checksum; None if there is none."""
    recorded = directory / CHECKSUM_FILE
    if not recorded.is_file():
        return None
    return recorded.read_text(encoding="utf-8").split()[0] == sha256(directory / _WEIGHTS)


def installed(packages: Sequence[str]) -> dict[str, str]:
    """Versions of those that are."""
    found: dict[str, str] = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
