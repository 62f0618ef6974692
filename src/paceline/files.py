"""Atomic files and directories, checksums, locks and JSON Lines.

    with atomic_directory(out) as partial:      # a sibling; renamed when the block succeeds
        save(partial)
        write_checksums(partial)
    verify_checksums(out)                       # raises ChecksumError that names the file

safetensors has no checksums: a flipped byte loads silently. So every directory of weights, checkpoints or logged
rollouts has a `SHA256SUMS` in the format of `sha256sum`. A single file carries an XXH3 checksum in its own metadata
(`SEAL`), which `seal` fills in and `verify_seal` checks.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from paceline.types import PacelineError

CHECKSUM_FILE = "SHA256SUMS"
_LINE = re.compile(rb"^([0-9a-f]{64})  ([^\n]+)\n", re.MULTILINE)
_PARTIAL = ".partial"
_OWNER = ".owner"
_SEAL = re.compile(rb"xxh3:[0-9a-f]{32}")
_SEAL_WITHIN = 2**16
# Trainers verify a file at every draw: SHA-256 is 19 times slower, and fingerprints of tensors leave out its header.
SEAL = "xxh3:" + 32 * "0"
"""Placeholder for a file's own checksum; it must be in the first 64 KiB."""

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  shared memory is the point; files in it are 0600 and have random names
SEGMENT_PREFIX = "paceline-"


class ChecksumError(PacelineError):
    """A file differs from its checksum."""


@contextmanager
def atomic_file(path: Path, *, durable: bool = False, private: bool = False) -> Iterator[Path]:
    """Yield a path beside `path`, which it replaces if the block succeeds. `durable` syncs it to disk, to survive a
    power failure; `private` restricts access to the owner, for rollouts and weights in shared directories."""
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
    """Return the final name of an atomic file or directory that is being written; return other paths unchanged."""
    return partial.with_name(partial.name[1:].rsplit(".", 2)[0]) if partial.name.endswith(_PARTIAL) else partial


def move_file(source: Path, target: Path) -> None:
    """Rename a file or directory atomically, within one file system."""
    source.replace(target)


def remove_directory(path: Path) -> None:
    """Remove an atomic directory. It is renamed first, so a kill leaves a partial directory, not a damaged one."""
    doomed = path.with_name(f".{path.name}.{secrets.token_hex(4)}{_PARTIAL}")
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def remove_partials(directory: Path, pattern: str = "*") -> None:
    """Remove partial files of killed writers of `pattern`. No writer may be alive."""
    for partial in directory.glob(f".{pattern}.*{_PARTIAL}"):
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        else:
            partial.unlink(missing_ok=True)


def private_directory(path: Path) -> Path:
    """Create `path` for this user only. Refuse a directory of another user, who could read and replace its files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()  # a link may lead anywhere
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PacelineError(
            f"{path} belongs to another user or is a link; must be a directory of yours because it will hold rollouts "
            "and weights"
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
    total = hashlib.sha256()
    for part in parts:
        total.update(part)
    return total.hexdigest()


def seal(file: Path) -> None:
    """Write the checksum of a file into its SEAL placeholder."""
    place, checksum = _own_checksum(file)
    assert place is not None, f"{file.name} has no place for a checksum"
    with file.open("r+b") as stream:
        stream.seek(place.start())
        stream.write(checksum)


def verify_seal(file: Path) -> None:
    """Compare a file with the checksum in it; raise ChecksumError if any bit has changed since `seal`."""
    place, checksum = _own_checksum(file)
    if place is None or place[0] != checksum:
        raise ChecksumError(f"{file} differs from the checksum in it; it is damaged or from another version")


def _own_checksum(file: Path) -> tuple[re.Match[bytes] | None, bytes]:
    """Find the checksum in a file and compute the expected one."""
    import xxhash  # optional for `paceline plan`

    total = xxhash.xxh3_128()
    with file.open("rb") as stream:
        head = stream.read(_SEAL_WITHIN)
        place = _SEAL.search(head)
        total.update(head if place is None else head[: place.start()] + SEAL.encode() + head[place.end() :])
        while block := stream.read(2**20):
            total.update(block)
    return place, f"xxh3:{total.hexdigest()}".encode()


def copy_verified(source: Path, target: Path) -> None:
    """Copy a file and read the copy back; raise ChecksumError if it differs."""
    shutil.copyfile(source, target)
    if sha256(source) != sha256(target):
        raise ChecksumError(f"{target} differs from its source {source}; check the disk and copy it again")


def write_checksums(directory: Path) -> None:
    """Write the SHA-256 of every file below `directory` into its SHA256SUMS."""
    names = sorted(_files_below(directory))
    lines = _lines({name: sha256(directory / name) for name in names})
    (directory / CHECKSUM_FILE).write_text(lines, encoding="utf-8")


def replace_checksums(directory: Path, checksums: Mapping[str, str]) -> None:
    """Replace SHA256SUMS by these checksums, by file name."""
    with atomic_file(directory / CHECKSUM_FILE, private=True) as partial:
        partial.write_text(_lines(checksums), encoding="utf-8")


def append_checksums(directory: Path, checksums: Mapping[str, str]) -> None:
    """Add checksums to SHA256SUMS. A later line for the same file overrides an earlier one."""
    with (directory / CHECKSUM_FILE).open("a", encoding="utf-8") as stream:
        stream.write(_lines(checksums))


def read_checksums(directory: Path) -> dict[str, str]:
    """Return the checksums in SHA256SUMS by file name. Skip lines that are damaged or were cut off by a crash."""
    try:
        content = (directory / CHECKSUM_FILE).read_bytes()
    except FileNotFoundError:
        return {}
    return {name.decode("utf-8", "replace"): checksum.decode() for checksum, name in _LINE.findall(content)}


def verify_checksums(directory: Path, *, complete: bool = False) -> bool:
    """Compare every file in SHA256SUMS with its checksum; raise ChecksumError for the first that differs or is missing.
    `complete` also refuses files that are not listed. Return False without SHA256SUMS, as in checkpoints that Paceline
    did not write."""
    recorded = directory / CHECKSUM_FILE
    if not recorded.is_file():
        return False
    if not re.fullmatch(rb"([0-9a-f]{64}  [^\n]+\n)+", recorded.read_bytes()):
        raise ChecksumError(f"{recorded} is damaged; copy the directory again")
    checksums = read_checksums(directory)
    if complete and (extra := _files_below(directory) - checksums.keys()):
        raise ChecksumError(f"{directory / min(extra)} is not in {recorded.name}; copy the directory again")
    for name in checksums:
        if not (directory / name).is_file():
            raise ChecksumError(
                f"{directory / name} is missing, but {recorded.name} lists it; copy the directory again"
            )
    with ThreadPoolExecutor() as threads:  # a large policy has many files
        found = list(threads.map(lambda name: sha256(directory / name), checksums))
    for (name, checksum), own in zip(checksums.items(), found, strict=True):
        if own != checksum:
            raise ChecksumError(
                f"{directory / name} differs from its checksum in {recorded.name}; copy the directory again, or delete "
                f"{recorded.name} if the change is your own"
            )
    return True


def _files_below(directory: Path) -> set[str]:
    files = (file.relative_to(directory).as_posix() for file in directory.rglob("*") if file.is_file())
    return {name for name in files if name != CHECKSUM_FILE}


def _lines(checksums: Mapping[str, str]) -> str:
    return "".join(f"{checksum}  {name}\n" for name, checksum in checksums.items())


@contextmanager
def lock(path: Path, *, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold a lock between processes, which the kernel releases when its process ends. Call `on_wait` before waiting."""
    path.parent.mkdir(parents=True, exist_ok=True)
    held = FileLock(path)
    try:
        acquired = held.acquire(blocking=False)
    except Timeout:
        on_wait()
        acquired = held.acquire()
    with acquired:
        yield


def create_owned(path: Path) -> int:
    """Create a private file that is locked before it has its name; return the descriptor that holds the lock until the
    owner ends. Unlike a process id in the name, a lock works across containers that share the directory. filelock,
    which `lock` uses, truncates the file that it locks."""
    hidden = path.with_name(f".{path.name}")
    descriptor = os.open(hidden, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    hidden.rename(path)  # only now: `remove_orphaned` in another process must never find it unlocked
    return descriptor


def remove_orphaned(path: Path) -> bool:
    """Remove a `create_owned` file of a dead owner; return False if the owner lives or is another user."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False  # removed meanwhile, a directory, a link, or another user's
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
    """Remove the shared-memory segments of killed processes; return their names."""
    return [path.name for path in SHARED_MEMORY.glob(f"{SEGMENT_PREFIX}*") if remove_orphaned(path)]


class OwnedDirectory:
    """A directory in `root`, removed by `close`, at process exit or, after a kill, by the next OwnedDirectory there."""

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
    """Return a secret shared by all processes of this user on this machine; create it at the first call. Do not cache
    it: after two first calls at once, both must read the one that was written last."""
    file = private_directory(SHARED_MEMORY / f"{SEGMENT_PREFIX}{os.getuid()}") / "token"
    if not file.exists():
        with atomic_file(file, private=True) as partial:
            partial.write_text(secrets.token_urlsafe(32), encoding="ascii")
    return file.read_text(encoding="ascii")


def read_jsonl(path: Path, *, strict: bool = False) -> Iterator[tuple[int, Any]]:
    """Yield line number and value of every line of a JSON Lines file; raise ValueError for a line that is not JSON.
    Lines end at newlines only: text may contain other line separators, such as U+2028. `strict` is for files that a
    program appends to: it skips a last line that a crash cut off, and refuses blank lines."""
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
            return f"not readable JSON ({error})"  # a number with too many digits


def installed(packages: Sequence[str]) -> dict[str, str]:
    """Return the versions of these packages, without those that are not installed."""
    found: dict[str, str] = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
