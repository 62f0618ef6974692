"""Where built checkpoints are kept: each is built once, whole or not at all, whoever asks at the same time."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from paceline.context import Context
from paceline.files import ChecksumError, lock, remove_partials, verify_checksums


def build_once(directory: Path, write: Callable[[Path], None], *, name: str, context: Context) -> Path:
    """Return the checkpoint in `directory`; if it is missing or damaged, `write` makes it, in one move and with
    checksums."""
    if is_whole(directory):
        return directory
    waiting = partial(context.progress, f"{name}: another process is building it")
    with lock(directory.with_name(directory.name + ".lock"), on_wait=waiting):
        if is_whole(directory):  # it was built while we waited
            return directory
        remove_partials(directory.parent, directory.name)  # left by a killed build; the lock keeps builders apart
        if directory.exists():
            context.progress(f"{name}: {directory} is damaged; building it again")
            shutil.rmtree(directory)
        write(directory)
    return directory


def is_whole(directory: Path) -> bool:
    """Whether a finished build is there and every file of it is as it was written."""
    try:
        return verify_checksums(directory)
    except ChecksumError:
        return False
