"""Transport over shared memory: the sender writes weights into a segment in /dev/shm, and engines map it.

There is one segment per target. It is reused, so `stage` must not run before every engine has answered the previous
push. An engine that reads while it is overwritten finds wrong fingerprints and refuses.
"""

from __future__ import annotations

import mmap
import os
import secrets
import warnings
import weakref
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import xxhash

from paceline.files import SEGMENT_PREFIX, SHARED_MEMORY, create_owned, sweep_segments
from paceline.fp8 import WHOLE, KvScales, LayerStacker, Sharding
from paceline.types import PacelineError, PushRefusedError
from paceline.weights.fingerprint import (
    BLOCK_BYTES,
    Bytes,
    by_worker,
    dtype_name,
    hash_threads,
    reference_fingerprints,
    seal,
    tensor_bytes,
)
from paceline.weights.message import Push, Target, TensorEntry, aligned, check_staged

# The segment grows by whole extents; a larger tensor gets its own extent.
_EXTENT_BYTES = 16 * 1024 * 1024


class ShmSender:
    """Owner of one segment per target, in the learner's sending rank."""

    def __init__(self) -> None:
        sweep_segments()
        self._segments: dict[Target, _Segment] = {}
        self._threads = ThreadPoolExecutor(hash_threads(), thread_name_prefix="paceline-stage")

    def stage(
        self,
        version: int,
        weights: Iterable[tuple[str, torch.Tensor]],
        target: Target = "policy",
        *,
        quantized: bool = False,
        sharding: Sharding = WHOLE,
        kv_scales: KvScales | None = None,
    ) -> Push:
        """Copy every tensor into the segment in its dtype and fingerprint it.

        Only a few tensors are in memory at a time, so gathering them from shards costs little memory. `quantized` and
        `sharding` are for FP8 engines, `kv_scales` for engines with an FP8 KV cache.
        """
        segment = self._segments.get(target)
        if segment is None:
            segment = self._segments[target] = _Segment(target)
        segment.rewind()
        entries: list[TensorEntry] = []
        pending: deque[Future[TensorEntry]] = deque()
        stacker = LayerStacker(sharding)
        references: list[Future[list[dict[str, str]]]] = []
        for name, tensor in weights:
            num_bytes = tensor.numel() * tensor.element_size()
            offset, room = segment.reserve(num_bytes)
            pending.append(self._threads.submit(_stage_tensor, name, tensor, offset, room))
            if quantized and (layer := stacker.add(name, tensor)) is not None:
                references.append(self._threads.submit(reference_fingerprints, *layer))
            if len(pending) > 4:
                entries.append(pending.popleft().result())
        entries.extend(future.result() for future in pending)
        check_staged(version, entries)
        return Push(
            version=version,
            target=target,
            transport="shared_memory",
            channel=segment.name,
            entries=tuple(entries),
            quantized=by_worker(reference.result() for reference in references),
            kv_scales=kv_scales,
        )

    def close(self) -> None:
        """Remove the segments. Their memory is freed once engines have mapped another segment or ended."""
        self._threads.shutdown()
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()


def free_bytes() -> int:
    free = os.statvfs(SHARED_MEMORY)
    return free.f_bavail * free.f_frsize


def segment_bytes(num_bytes: int) -> int:
    """Estimate the size of a segment for this many bytes of weights, rounded up to extents plus a partial one."""
    return (num_bytes // _EXTENT_BYTES + 2) * _EXTENT_BYTES


class _Segment:
    """A locked file in shared memory that grows by extents, each mapped and populated once."""

    def __init__(self, target: Target) -> None:
        self.name = f"{SEGMENT_PREFIX}{os.getpid()}-{target}-{secrets.token_hex(8)}"
        path = SHARED_MEMORY / self.name
        self._descriptor = create_owned(path)
        self._finalizer = weakref.finalize(self, _remove, path, self._descriptor, os.getpid())
        self._extents: list[tuple[int, Bytes]] = []
        self._size = 0
        self._extent = self._cursor = 0

    def rewind(self) -> None:
        self._extent = self._cursor = 0

    def reserve(self, num_bytes: int) -> tuple[int, Bytes]:
        """Return the file offset and writable memory for the next tensor, the same at every push of a model."""
        while self._extent < len(self._extents):
            start, memory = self._extents[self._extent]
            if self._cursor + num_bytes <= len(memory):
                begin = self._cursor
                self._cursor = aligned(begin + num_bytes)
                return start + begin, memory[begin : begin + num_bytes]
            self._extent += 1
            self._cursor = 0
        self._grow(num_bytes)
        return self.reserve(num_bytes)

    def close(self) -> None:
        self._extents.clear()
        self._finalizer()

    def _grow(self, num_bytes: int) -> None:
        page = mmap.ALLOCATIONGRANULARITY
        size = -(-max(num_bytes, _EXTENT_BYTES) // page) * page
        try:
            # Without allocation, lack of space would be a SIGBUS when writing to the sparse file.
            os.posix_fallocate(self._descriptor, self._size, size)
        except OSError as error:
            raise PacelineError(
                f"{SHARED_MEMORY}: {(self._size + size) / 1e9:.2f} GB needed for the weights, "
                f"{free_bytes() / 1e9:.2f} GB left ({error.strerror}); enlarge it (docker run --shm-size)"
            ) from error
        memory = mmap.mmap(self._descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, offset=self._size)
        self._extents.append((self._size, np.frombuffer(memory, np.uint8)))
        self._size += size


def _remove(path: Path, descriptor: int, owner_pid: int) -> None:
    if os.getpid() == owner_pid:  # a forked child inherits this finalizer
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _stage_tensor(name: str, tensor: torch.Tensor, offset: int, room: Bytes) -> TensorEntry:
    source = tensor_bytes(tensor)
    digest = xxhash.xxh3_128()
    for start in range(0, len(room), BLOCK_BYTES):
        block = room[start : start + BLOCK_BYTES]
        np.copyto(block, source[start : start + BLOCK_BYTES])
        digest.update(block.data)
    dtype = dtype_name(tensor.dtype)
    sealed = seal(digest, dtype, tensor.shape)
    return TensorEntry(
        name=name, dtype=dtype, shape=tuple(tensor.shape), offset=offset, num_bytes=len(room), fingerprint=sealed
    )


class ShmReceiver:
    """Map segments and keep them mapped for the next push."""

    def __init__(self) -> None:
        self._mapped: dict[Target, tuple[str, torch.Tensor]] = {}

    def fetch(self, push: Push) -> torch.Tensor:
        """Return the bytes of a push as read-only memory, which the next push overwrites."""
        name, memory = self._mapped.get(push.target, ("", torch.empty(0, dtype=torch.uint8)))
        if name != push.channel or memory.numel() < push.extent:
            self._mapped.pop(push.target, None)
            memory = _map_segment(push.channel, push.extent)
            self._mapped[push.target] = (push.channel, memory)
        return memory

    def close(self) -> None:
        self._mapped.clear()


def _map_segment(name: str, size: int) -> torch.Tensor:
    if not name.startswith(SEGMENT_PREFIX) or "/" in name:
        raise PushRefusedError(
            f"segment {name!r}: must be a file in {SHARED_MEMORY} that begins with {SEGMENT_PREFIX!r}"
        )
    try:
        descriptor = os.open(SHARED_MEMORY / name, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        why = f"{error.strerror}; sender and engine must share {SHARED_MEMORY}"
        raise PushRefusedError(f"segment {name}: {why}") from error
    try:
        length = os.fstat(descriptor).st_size
        if length < size:  # reading past the end of a mapped file raises SIGBUS
            raise PushRefusedError(f"segment {name}: got {length} bytes; must be at least {size}")
        # Read-only, so that a loader that works in place fails instead of changing the weights of other engines.
        memory = mmap.mmap(descriptor, length, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(memory, dtype=torch.uint8)
