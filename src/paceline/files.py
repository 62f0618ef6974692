"""Files that are written whole or not at all, their checksums, the one file lock, and JSON Lines.

    with atomic_file(directory / "metrics.html") as partial:     # a sibling; renamed when the block succeeds
        partial.write_text(page)
    with atomic_directory(out) as partial:                       # the same for a directory that must not exist yet
        save(partial)
        write_checksums(partial)
    verify_checksums(out)                                        # raises ChecksumError that names the file

safetensors has no checksum of its own: one flipped byte loads silently. So every directory of weights has a
`SHA256SUMS`, in the format of `sha256sum`, which is written before the directory gets its name and verified when
weights are loaded from it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from paceline.types import PacelineError

CHECKSUM_FILE = "SHA256SUMS"
_PARTIAL = ".partial"


class ChecksumError(PacelineError):
    """A file is not what it was when its checksum was taken."""


@contextmanager
def atomic_file(path: Path, *, durable: bool = False, private: bool = False) -> Iterator[Path]:
    """Yield a path beside `path` to write to; it replaces `path` when the block ends, and is removed if the block
    fails.

    `durable` also waits until the disk has it: for what a run must find again after a power failure.
    `private` makes a file that only its owner can read: for rollouts and weights in a directory that all users see.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}{_PARTIAL}")
    try:
        if private:
            os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        yield partial
        if durable:
            _sync(partial)
        partial.replace(path)
        if durable:
            _sync(path.parent)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def atomic_directory(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Yield a new directory beside `path`; it is renamed to `path`, which must not exist, when the block succeeds."""
    if path.exists():
        raise ValueError(f"{path} exists; must be new because a finished directory is never overwritten")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}{_PARTIAL}")
    partial.mkdir()
    try:
        yield partial
        if durable:
            for file in (*(file for file in partial.rglob("*") if file.is_file()), partial):
                _sync(file)
        partial.rename(path)
        if durable:
            _sync(path.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def move_file(source: Path, target: Path) -> None:
    """Give a whole file another name in the same file system; whoever opens `target` finds the old or the new one."""
    source.replace(target)


def remove_partials(directory: Path, pattern: str = "*") -> None:
    """Remove what killed writers of files that match `pattern` left behind; the caller knows that none of them is
    alive."""
    for partial in directory.glob(f".{pattern}.*{_PARTIAL}"):
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        else:
            partial.unlink(missing_ok=True)


def private_directory(path: Path) -> Path:
    """Make `path` as a directory that only its owner can enter; one that exists already keeps its permissions."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    return path


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sha256_of(parts: Iterable[bytes | memoryview]) -> str:
    """Checksum of what is in memory, for a single file that carries it in its own metadata."""
    total = hashlib.sha256()
    for part in parts:
        total.update(part)
    return total.hexdigest()


def copy_verified(source: Path, target: Path) -> None:
    """Copy a file and read the copy back; a copy that differs raises ChecksumError."""
    shutil.copyfile(source, target)
    if sha256(source) != sha256(target):
        raise ChecksumError(
            f"{target} differs from {source}, which it was copied from; check the disk and copy it again"
        )


def write_checksums(directory: Path) -> None:
    """Write the checksum of every file below `directory` into its SHA256SUMS."""
    files = sorted(file for file in directory.rglob("*") if file.is_file() and file.name != CHECKSUM_FILE)
    lines = [f"{sha256(file)}  {file.relative_to(directory).as_posix()}\n" for file in files]
    (directory / CHECKSUM_FILE).write_text("".join(lines), encoding="utf-8")


def verify_checksums(directory: Path) -> bool:
    """Compare every file that SHA256SUMS lists with its checksum; the first that differs or is missing raises
    ChecksumError.

    Returns False if there is no SHA256SUMS, as in checkpoints that Paceline did not write.
    """
    recorded = directory / CHECKSUM_FILE
    if not recorded.is_file():
        return False
    for line in recorded.read_text(encoding="utf-8").splitlines():
        checksum, _, name = line.partition("  ")
        file = directory / name
        if not file.is_file():
            raise ChecksumError(f"{file} is missing, but {recorded.name} lists it; copy the directory again")
        if sha256(file) != checksum:
            raise ChecksumError(
                f"{file} differs from its checksum in {recorded.name}; copy the directory again, or delete "
                f"{recorded.name} if the change is your own"
            )
    return True


@contextmanager
def lock(path: Path, *, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold a lock between processes, released when its process ends, however it ends; `on_wait` is called if another
    holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    held = FileLock(path)
    try:
        held.acquire(blocking=False)
    except Timeout:
        on_wait()
        held.acquire()
    try:
        yield
    finally:
        held.release()


def create_owned(path: Path) -> int:
    """Create a private file that is locked before it has its name; returns its descriptor, which holds the lock.

    The kernel releases the lock when the owner ends, however it ends. A lock, unlike a process id in the name, is also
    right across containers that share the directory. `lock` cannot do this: filelock truncates the file that it locks.
    """
    unseen = path.with_name(f".{path.name}")
    descriptor = os.open(unseen, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    unseen.rename(path)  # only now: `remove_orphaned` in another process must never find it unlocked
    return descriptor


def remove_orphaned(path: Path) -> bool:
    """Remove a file of `create_owned` whose owner has ended; False if the owner lives, or is another user's."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError):
        return False  # removed meanwhile, or another user's
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        path.unlink(missing_ok=True)
        return True
    finally:
        os.close(descriptor)


def read_jsonl(path: Path, *, strict: bool = False) -> Iterator[tuple[int, Any]]:
    """Yield line number and value of every line of a JSON Lines file; a line that is not JSON raises ValueError.

    A line ends at a newline and nowhere else: text may hold what other readers take for the end of a line (U+2028). A
    byte order mark at the start is passed over.

    `strict` is for files that a program writes line by line: a last line without its newline was cut off by a crash and
    is left out, and a blank line is damage. Without it blank lines are passed over, and the last line needs no newline.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if strict and not line.endswith(b"\n"):
                return
            if not strict and not line.strip():
                continue
            try:
                yield number, json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except (ValueError, RecursionError) as error:
                raise ValueError(
                    f"{path}, line {number}: got {line[:60].decode(errors='replace')!r}, which is {_not_json(error)}; "
                    "delete the line to read the others"
                ) from None


def _not_json(error: ValueError | RecursionError) -> str:
    match error:
        case json.JSONDecodeError():
            return f"not JSON ({error.msg})"
        case UnicodeDecodeError():
            return "not UTF-8"
        case RecursionError():
            return "nested too deeply"
        case _:
            return f"not JSON that can be read ({error})"  # a number of too many digits


def installed(packages: Sequence[str]) -> dict[str, str]:
    """Versions of those packages that are installed."""
    found: dict[str, str] = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
