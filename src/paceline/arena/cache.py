"""Where built checkpoints are kept: each is built once, whole or not at all, whoever asks at the same time."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.origin import is_as_written

DEFAULT_CACHE_ROOT = Path.home() / ".cache" / "paceline"

Progress = Callable[[str], None]


def build_once(directory: Path, write: Callable[[Path], None], *, name: str, progress: Progress) -> Path:
    """The checkpoint in `directory`, written first when it is missing or damaged; `write` must leave a checksum file in it."""
    if is_whole(directory):
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _lock(directory.with_name(directory.name + ".lock"), lambda: progress(f"{name}: another process is building it")):
        if is_whole(directory):  # it was built while we waited
            return directory
        if directory.exists():
            progress(f"{name}: {directory} is damaged; building it again")
            shutil.rmtree(directory)
        # A fixed name: what a killed build left behind is cleared by the next one, and the lock keeps builders apart.
        temporary = directory.with_name(directory.name + ".building")
        shutil.rmtree(temporary, ignore_errors=True)
        write(temporary)
        temporary.rename(directory)
    return directory


def is_whole(directory: Path) -> bool:
    """Whether a finished build is there and its weights are as written."""
    return (directory / "model.safetensors").is_file() and is_as_written(directory) is True


@contextmanager
def _lock(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold a file lock, which the system releases when its holder dies."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
