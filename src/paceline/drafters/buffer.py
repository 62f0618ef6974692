"""Training data for drafters: rollouts with hidden states, passed from learner to trainers in a bounded directory.

    learner's ranks ── put ──▶ one file a document, moved into place ──▶ trainers on the node ── draw, heldout ──▶ mmap

The directory is usually in shared memory. Readers map files, so a removed file stays intact for them. The name of a
file holds version, length and use, so listing the directory opens no files.

The oldest policy versions are evicted first, with two exceptions. Many short responses would crowd out the long ones,
which matter most because they form the tail of a phase, so the longest documents of earlier versions keep a share of
the capacity until their version expires. Held-out documents have separate capacity. The hash of the prompt decides
whether a document is held out, so siblings and later epochs of a held-out prompt are never trained on.

The target distribution is the policy's output head applied to a document's last hidden states. Only the newest head is
kept, so older hidden states pass through a newer head; `keep_versions` bounds their age.

Dimension suffixes: V vocabulary, D hidden size of the policy.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from paceline.config import BufferConfig
from paceline.drafters.packing import Document
from paceline.files import SEAL, ChecksumError, atomic_file, private_directory, remove_partials, seal, verify_seal
from paceline.types import Floats

LONG_SHARE = 0.25
"""Share of the room for the longest documents of earlier versions."""
STEP_SHARE = 0.25
"""Share of the capacity that one step may write."""
_MAGIC = 0x70_6C_64_62
_HEADER_WORDS = 16
"""Magic, tokens, prompt tokens, taps, hidden size, zero, ten of checksum; every word has 4 bytes, as has everything
behind them."""
_SUFFIX = ".document"
_HEAD_SUFFIX = ".head"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A document in the directory, as its file name describes it."""

    file: Path
    version: int
    num_tokens: int
    num_bytes: int
    heldout: bool


class Buffer:
    """One process's access to the directory. Safe across processes, not across threads."""

    def __init__(self, directory: Path, config: BufferConfig, *, writer: str | None = None) -> None:
        """`writer` identifies a process that writes documents; readers have none."""
        assert writer is None or writer.isalnum(), "it is a part of file names"
        self._directory = directory
        self._config = config
        self._writer = writer
        self._last_name_ns = 0
        self._heads_seen: dict[str, bool] = {}
        self.num_broken = 0
        """Failed reads; a damaged file counts every time it is drawn."""
        private_directory(directory)
        if writer is not None:
            remove_partials(directory, f"*-{writer}-*")  # left by a crash

    def put(self, documents: Sequence[Document], version: int) -> None:
        """Write documents of this policy version, then evict others. Documents without anchors are left out."""
        for document in documents:
            if document.num_anchors:
                use = "h" if is_heldout(document, self._config.heldout_share) else "t"
                self._write(f"{self._new_name(version)}-{len(document.token_ids):08d}-{use}{_SUFFIX}", _parts(document))
        for entry in victims(self.entries(), self._config):
            entry.file.unlink(missing_ok=True)

    def put_head(self, head_VD: Floats, version: int) -> None:
        """Write the policy's output head of this version and remove older ones. Only one writer calls this."""
        self._write(
            f"{self._new_name(version)}-{head_VD.shape[0]:08d}-{head_VD.shape[1]:08d}{_HEAD_SUFFIX}",
            [_header(), head_VD],
        )
        for older in sorted(self._directory.glob(f"*{_HEAD_SUFFIX}"))[:-1]:
            older.unlink(missing_ok=True)

    def head(self) -> tuple[int, Floats] | None:
        """Return the newest intact head as a view of its file, with its version."""
        for file in sorted(self._directory.glob(f"*{_HEAD_SUFFIX}"), reverse=True):
            version, *_, rows, columns = file.name.removesuffix(_HEAD_SUFFIX).split("-")
            shape = int(rows), int(columns)
            with suppress(FileNotFoundError):  # a newer one has come meanwhile
                if self._is_whole_head(file):
                    return int(version), np.memmap(file, np.float32, "r", offset=4 * _HEADER_WORDS, shape=shape)
        return None

    def _is_whole_head(self, file: Path) -> bool:
        """Return whether a head is intact. Results are cached because every slice of training asks."""
        if file.name not in self._heads_seen:
            try:
                verify_seal(file)
                self._heads_seen = {file.name: True}
            except ChecksumError:
                self._heads_seen = {file.name: False}
                self.num_broken += 1
        return self._heads_seen[file.name]

    def entries(self) -> list[Entry]:
        """List all documents, the oldest version first."""
        return sorted(self._look(), key=lambda entry: entry.file.name)

    def draw(self, num_tokens: int, rng: np.random.Generator) -> list[Document]:
        """Draw random training documents of about this many tokens, without replacement."""
        candidates = [entry for entry in self.entries() if not entry.heldout]
        order = (candidates[i] for i in rng.permutation(len(candidates)))
        return list(self._take(order, num_tokens))

    def heldout(self, num_tokens: int) -> list[Document]:
        """Return the newest held-out documents, of about this many tokens."""
        return list(self._take((entry for entry in reversed(self.entries()) if entry.heldout), num_tokens))

    def _take(self, entries: Iterator[Entry], num_tokens: int) -> Iterator[Document]:
        for entry in entries:
            if num_tokens <= 0:
                return
            try:
                yield _map(entry.file)
                num_tokens -= entry.num_tokens
            except FileNotFoundError:  # a writer has made room
                continue
            except (ChecksumError, ValueError):
                self.num_broken += 1

    def _new_name(self, version: int) -> str:
        assert self._writer is not None, "a reader puts nothing"
        self._last_name_ns = max(self._last_name_ns + 1, time.time_ns())  # a clock may stand still or go back
        return f"{version:08d}-{self._last_name_ns:020d}-{self._writer}"

    def _write(self, name: str, parts: Sequence[np.ndarray[Any, Any]]) -> None:
        with atomic_file(self._directory / name, private=True) as partial:
            with partial.open("wb") as file:
                for part in parts:
                    file.write(np.ascontiguousarray(part).data)  # `tofile` ignores a full disk at its end
            seal(partial)

    def _look(self) -> Iterator[Entry]:
        with os.scandir(self._directory) as found:
            for item in found:
                if not item.name.endswith(_SUFFIX):
                    continue
                version, _, _, num_tokens, use = item.name.removesuffix(_SUFFIX).split("-")
                with suppress(FileNotFoundError):  # evicted meanwhile
                    yield Entry(
                        file=Path(item.path),
                        version=int(version),
                        num_tokens=int(num_tokens),
                        num_bytes=item.stat().st_size,
                        heldout=use == "h",
                    )


def is_heldout(document: Document, share: float) -> bool:
    """Return whether documents of this prompt are held out. The answer is the same in every process and epoch."""
    prompt = np.ascontiguousarray(document.token_ids[: document.num_prompt_tokens], "<i4")
    return xxhash.xxh3_64_intdigest(prompt.tobytes()) < share * 2**64


def victims(entries: Sequence[Entry], config: BufferConfig) -> list[Entry]:
    """Return the entries to evict. `entries` are sorted from oldest to newest."""
    if not entries:
        return []
    newest = max(entry.version for entry in entries)
    expired = [entry for entry in entries if entry.version <= newest - config.keep_versions]
    kept = [entry for entry in entries if entry.version > newest - config.keep_versions]
    heldout = [entry for entry in kept if entry.heldout]
    trained = [entry for entry in kept if not entry.heldout]
    capacity = int(config.capacity_mb * 2**20)
    heldout_capacity = int(capacity * config.heldout_share)
    capacity -= heldout_capacity
    earlier = [entry for entry in trained if entry.version < newest]
    longest_first = sorted(earlier, key=lambda entry: entry.num_tokens, reverse=True)
    floor = set(_fitting(longest_first, int(capacity * LONG_SHARE)))
    floor_last = sorted(trained, key=lambda entry: entry in floor)
    return [
        *expired,
        *_first(floor_last, sum(entry.num_bytes for entry in trained) - capacity),
        *_first(heldout, sum(entry.num_bytes for entry in heldout) - heldout_capacity),
    ]


def _fitting(entries: Sequence[Entry], capacity: int) -> Iterator[Entry]:
    for entry in entries:
        capacity -= entry.num_bytes
        if capacity < 0:
            return
        yield entry


def _first(entries: Sequence[Entry], num_bytes: int) -> Iterator[Entry]:
    """Take entries until they make up `num_bytes`."""
    for entry in entries:
        if num_bytes <= 0:
            return
        num_bytes -= entry.num_bytes
        yield entry


def step_bytes(config: BufferConfig) -> float:
    """Return the number of bytes that one step may write."""
    return STEP_SHARE * config.capacity_mb * 2**20


def document_bytes(num_tokens: int, num_taps: int, hidden_size: int) -> int:
    """Size of a document's file in bytes."""
    return 4 * (_HEADER_WORDS + num_tokens * (1 + (num_taps + 1) * hidden_size))


def _parts(document: Document) -> list[np.ndarray[Any, Any]]:
    num_tokens, num_taps, hidden_size = document.taps.shape
    assert document.token_ids.shape == (num_tokens,) and document.last.shape == (num_tokens, hidden_size)
    return [
        _header(num_tokens, document.num_prompt_tokens, num_taps, hidden_size),
        document.token_ids.astype(np.int32),
        document.taps.astype(np.float32, copy=False),  # most of the bytes; avoid a copy
        document.last.astype(np.float32, copy=False),
    ]


def _header(*numbers: int) -> np.ndarray[Any, Any]:
    """Return the header of a file, with room for its checksum."""
    words = np.zeros(_HEADER_WORDS, np.int32)
    words[: 1 + len(numbers)] = (_MAGIC, *numbers)
    words.view(np.uint8)[24 : 24 + len(SEAL)] = np.frombuffer(SEAL.encode(), np.uint8)
    return words


def _map(file: Path) -> Document:
    """Map a file as a document; raise ChecksumError or ValueError if the file is damaged."""
    verify_seal(file)
    words = np.memmap(file, np.int32, "r")
    if len(words) < _HEADER_WORDS or words[0] != _MAGIC:
        raise ValueError(f"{file.name}: not a document of this buffer")
    num_tokens, num_prompt_tokens, num_taps, hidden_size = (int(word) for word in words[1:5])
    if 4 * len(words) != document_bytes(num_tokens, num_taps, hidden_size):
        raise ValueError(
            f"{file.name}: {4 * len(words)} bytes; must be {document_bytes(num_tokens, num_taps, hidden_size)}"
        )
    taps_at = _HEADER_WORDS + num_tokens
    last_at = taps_at + num_tokens * num_taps * hidden_size
    return Document(
        token_ids=words[_HEADER_WORDS:taps_at],
        num_prompt_tokens=num_prompt_tokens,
        taps=words[taps_at:last_at].view(np.float32).reshape(num_tokens, num_taps, hidden_size),
        last=words[last_at:].view(np.float32).reshape(num_tokens, hidden_size),
    )
