"""Exchange of finished rollouts between the history drafters of a node, through a directory.

    engine A ── put ──▶ buffer ── every PERIOD_S ──▶ one small file, moved into place ──▶ engines B, C, ... ── take

Files are private, carry a checksum and are moved into place when complete. A file that is damaged, or of a policy with
another vocabulary, is skipped and counted. Each call reads at most one small file, which takes one to two milliseconds
of an engine step. Names start with the time: beyond `capacity_mb` the oldest files of any engine are removed.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import xxhash

from paceline.drafters.history import Record
from paceline.files import atomic_file, private_directory

PERIOD_S = 2.0
_MAX_TOKENS = 16_384  # per file, unless a single rollout is longer
_MAX_BYTES = 2**24
_SUFFIX = ".rollouts"
_MAGIC = b"paceline-history"


class HistoryExchange:
    """One engine's access to the directory. Safe across processes, not across threads."""

    def __init__(self, directory: Path, *, vocabulary_size: int, capacity_mb: float) -> None:
        self._directory = directory
        self._vocabulary_size = vocabulary_size
        self._capacity_bytes = int(capacity_mb * 2**20)
        self._name = uuid.uuid4().hex
        self._looked_s = float("-inf")
        self._buffer: list[Record] = []
        self._known: set[str] = set()
        self._waiting: list[str] = []
        self.num_broken = 0
        """Files that were damaged or of another vocabulary."""
        private_directory(directory)

    def put(self, records: Sequence[Record]) -> None:
        self._buffer += records

    def take(self) -> list[Record]:
        """Return the rollouts of at most one file, and write and list the directory every PERIOD_S."""
        now_s = time.monotonic()
        if now_s - self._looked_s >= PERIOD_S:
            self._looked_s = now_s  # first, so that a failing directory is not tried at every step
            self._write()
            self._look()
        if not self._waiting:
            return []
        try:
            file = self._directory / self._waiting.pop(0)
            if file.stat().st_size > _MAX_BYTES:
                raise ValueError(f"{file.name}: larger than {_MAX_BYTES} bytes")
            return decode(file.read_bytes(), self._vocabulary_size)
        except FileNotFoundError:  # evicted by another engine
            return []
        except ValueError:
            self.num_broken += 1
            return []

    def _write(self) -> None:
        while self._buffer:
            ends = np.cumsum([len(record.token_ids) for record in self._buffer])
            count = max(1, int(np.searchsorted(ends, _MAX_TOKENS, "right")))
            records, self._buffer = self._buffer[:count], self._buffer[count:]
            name = f"{time.time_ns():020d}-{self._name}{_SUFFIX}"
            with atomic_file(self._directory / name, private=True) as partial:
                partial.write_bytes(encode(records, self._vocabulary_size))

    def _look(self) -> None:
        sizes: dict[str, int] = {}
        for entry in os.scandir(self._directory):
            with suppress(FileNotFoundError):  # removed meanwhile
                sizes[entry.name] = entry.stat().st_size
        excess = sum(sizes.values()) - self._capacity_bytes
        for name in sorted(sizes, key=lambda name: name.lstrip(".")):  # by time, partial files included
            if excess <= 0:
                break
            (self._directory / name).unlink(missing_ok=True)
            excess -= sizes.pop(name)
        theirs = {name for name in sizes if name.endswith(_SUFFIX) and self._name not in name}
        self._waiting += sorted(theirs - self._known)
        self._known = theirs


def encode(records: Sequence[Record], vocabulary_size: int) -> bytes:
    """Encode as magic, checksum, vocabulary; then prompt (two words), context, length and tokens, all int32."""
    parts = [np.array([vocabulary_size], np.int32)]
    for record in records:
        prompt = np.array([record.prompt], "<u8").view(np.int32)
        sizes = np.array([record.num_context, len(record.token_ids)], np.int32)
        parts += [prompt, sizes, np.asarray(record.token_ids, np.int32)]
    body = np.concatenate(parts).astype("<i4").tobytes()
    return _MAGIC + xxhash.xxh3_64_digest(body) + body


def decode(content: bytes, vocabulary_size: int) -> list[Record]:
    """Decode the records of a file; raise ValueError if it is damaged or of another vocabulary."""
    start = len(_MAGIC) + 8
    body = content[start:]
    if content[: len(_MAGIC)] != _MAGIC or content[len(_MAGIC) : start] != xxhash.xxh3_64_digest(body) or len(body) % 4:
        raise ValueError("rollouts: damaged, or not from a history exchange")
    words = np.frombuffer(body, "<i4").astype(np.int32)
    if len(words) == 0 or words[0] != vocabulary_size:
        raise ValueError(f"rollouts: of another vocabulary than {vocabulary_size}")
    records = []
    at = 1
    while at < len(words):
        if at + 4 > len(words):
            raise ValueError("rollouts: ends inside a record")
        prompt = int(words[at : at + 2].view("<u8")[0])
        num_context, num_tokens = int(words[at + 2]), int(words[at + 3])
        token_ids = words[at + 4 : at + 4 + max(0, num_tokens)]
        whole = 0 < len(token_ids) == num_tokens and 0 <= num_context <= num_tokens
        if not whole or token_ids.min() < 0 or token_ids.max() >= vocabulary_size:
            raise ValueError("rollouts: invalid record")
        records.append(Record(prompt=prompt, num_context=num_context, token_ids=token_ids))
        at += 4 + num_tokens
    return records
