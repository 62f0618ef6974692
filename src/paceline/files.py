"""Files that are written whole or not at all, their checksums, the one file lock, and JSON Lines.

    with atomic_file(directory / "metrics.html") as partial:     # a sibling; renamed when the block succeeds
        partial.write_text(page)
    with atomic_directory(out) as partial:                       # the same for a directory that must not exist yet
        save(partial)
        write_checksums(partial)
    verify_checksums(out)                                        # raises ChecksumError that names the file

safetensors has no checksum of its own: one flipped byte loads silently. So every directory of weights has a
`SHA256SUMS`, in the format of `sha256sum`, which is written before the directory gets its name and verified when
weights are loaded from it. A single file carries its checksum in its own header, where it was written with `SEAL`:

    with atomic_file(file, private=True) as partial:
        save_file(tensors, partial, metadata={"seal": SEAL})
        seal(partial)
    verify_seal(file)                                            # raises ChecksumError for any bit that differs

What a crash of the machine must not take is written `durable`, which waits for the disk: a checkpoint, not a round of
drafter training, which is in memory. A seal is XXH3, at a tenth of the time of SHA-256 and less than that of writing.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from paceline.types import PacelineError

CHECKSUM_FILE = "SHA256SUMS"
_PARTIAL = ".partial"
_OWNER = ".owner"
_SEAL = re.compile(rb"xxh3:[0-9a-f]{32}")
_SEAL_WITHIN = 2**16
SEAL = "xxh3:" + 32 * "0"
"""The place of a file's own checksum, which `seal` fills; it must be in the first 64 KiB."""

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  shared memory is the point; files in it are 0600 and have random names
SEGMENT_PREFIX = "paceline-"


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
            for file in (*partial.rglob("*"), partial):  # directories as well: they hold the names
                _sync(file)
        partial.rename(path)
        if durable:
            _sync(path.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def final_path(partial: Path) -> Path:
    """The name that an atomic file or directory gets which is being written; that of any other path is its own."""
    return partial.with_name(partial.name[1:].rsplit(".", 2)[0]) if partial.name.endswith(_PARTIAL) else partial


def move_file(source: Path, target: Path) -> None:
    """Give a whole file or directory another name in the same file system; whoever opens `target` finds the old or
    the new one."""
    source.replace(target)


def remove_directory(path: Path) -> None:
    """Remove a directory whose name stands for a whole one: the name goes first, and what a kill leaves is a partial
    one."""
    doomed = path.with_name(f".{path.name}.{secrets.token_hex(4)}{_PARTIAL}")
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def remove_partials(directory: Path, pattern: str = "*") -> None:
    """Remove what killed writers of files that match `pattern` left behind; the caller knows that none of them is
    alive."""
    for partial in directory.glob(f".{pattern}.*{_PARTIAL}"):
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        else:
            partial.unlink(missing_ok=True)


def private_directory(path: Path) -> Path:
    """Make `path` a directory that only this user can enter. Another user's is refused: its owner could read what is
    put there, and put something else in its place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()  # a link may lead anywhere
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PacelineError(
            f"{path} belongs to another user, or is a link; must be a directory of yours because rollouts and weights "
            "are kept in it: name another one"
        )
    if found.st_mode & 0o077:
        path.chmod(0o700)
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


def seal(file: Path) -> None:
    """Write the checksum of a file into the file, where it has SEAL; `verify_seal` then finds any bit that differs."""
    place, checksum = _own_checksum(file)
    assert place is not None, f"{file.name} has no place for a checksum"
    with file.open("r+b") as stream:
        stream.seek(place.start())
        stream.write(checksum)


def verify_seal(file: Path) -> None:
    """Compare a file with the checksum in it; ChecksumError if any bit of it is not as `seal` saw it."""
    place, checksum = _own_checksum(file)
    if place is None or place[0] != checksum:
        raise ChecksumError(f"{file} differs from the checksum in it; it is damaged, or no file of this version")


def _own_checksum(file: Path) -> tuple[re.Match[bytes] | None, bytes]:
    """Find the place of a file's checksum, and compute what has to be there."""
    import xxhash  # `paceline plan` does without

    total = xxhash.xxh3_128()
    with file.open("rb") as stream:
        head = stream.read(_SEAL_WITHIN)
        place = _SEAL.search(head)
        total.update(head if place is None else head[: place.start()] + SEAL.encode() + head[place.end() :])
        while block := stream.read(2**20):
            total.update(block)
    return place, f"xxh3:{total.hexdigest()}".encode()


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
    content = recorded.read_bytes()
    if not re.fullmatch(rb"([0-9a-f]{64}  [^\n]+\n)+", content):
        raise ChecksumError(f"{recorded} is damaged; copy the directory again")
    lines = [line.split("  ", 1) for line in content.decode("utf-8", "replace").removesuffix("\n").split("\n")]
    for _, name in lines:
        if not (directory / name).is_file():
            raise ChecksumError(
                f"{directory / name} is missing, but {recorded.name} lists it; copy the directory again"
            )
    with ThreadPoolExecutor() as threads:  # a large policy has many files
        found = list(threads.map(lambda line: sha256(directory / line[1]), lines))
    for (checksum, name), own in zip(lines, found, strict=True):
        if own != checksum:
            raise ChecksumError(
                f"{directory / name} differs from its checksum in {recorded.name}; copy the directory again, or delete "
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
    """Remove a file of `create_owned` whose owner has ended; False if the owner lives, or if it is none of this user's
    files."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False  # removed meanwhile, a directory, a link, another user's
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        path.unlink(missing_ok=True)
        return True
    finally:
        os.close(descriptor)


def sweep_segments() -> list[str]:
    """Remove what a killed process has left in shared memory, which nobody else would; returns the names."""
    return [path.name for path in SHARED_MEMORY.glob(f"{SEGMENT_PREFIX}*") if remove_orphaned(path)]


class OwnedDirectory:
    """A directory in `root` that goes with its process: by `close`, at the process's end, or, after a kill, when the
    next one is made in the same root."""

    def __init__(self, root: Path) -> None:
        private_directory(root)
        for owner in root.glob(f"*{_OWNER}"):
            if remove_orphaned(owner):
                shutil.rmtree(owner.with_suffix(""), ignore_errors=True)
        self.path = root / secrets.token_hex(8)
        self._descriptor = create_owned(self.path.with_suffix(_OWNER))
        self.path.mkdir(mode=0o700)
        self.close = weakref.finalize(self, _remove_owned, self.path, self._descriptor, os.getpid())


def _remove_owned(path: Path, descriptor: int, owner_pid: int) -> None:
    if os.getpid() == owner_pid:  # a forked child inherits this call
        shutil.rmtree(path, ignore_errors=True)
        path.with_suffix(_OWNER).unlink(missing_ok=True)
        os.close(descriptor)


def shared_token() -> str:
    """Return a secret that all processes of this user on this machine can read and nobody else can; the first that asks
    makes it. Ask again each time: two that are the first at once agree on the last one's."""
    file = private_directory(SHARED_MEMORY / f"{SEGMENT_PREFIX}{os.getuid()}") / "token"
    if not file.exists():
        with atomic_file(file, private=True) as partial:
            partial.write_text(secrets.token_urlsafe(32), encoding="ascii")
    return file.read_text(encoding="ascii")


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
