"""Transport over torch.distributed: the learner broadcasts a push to the workers of all engines.

Sender and workers form a separate process group with a TCPStore that the sender hosts, because FSDP and vLLM use the
default group. gloo is the backend on the CPU, NCCL on GPUs; only gloo has been run.

    sender      host ─▶ join ──────────────────── stage ─▶ transmit ─▶ transmit ...
    worker              join(rank) ── message by rpc ─────▶ fetch    ─▶ fetch   ...

Memory: the sender keeps the staged tensors and one bucket until they are sent. A worker keeps a whole push beside its
model on its device until it is loaded, so that a push can be refused as a whole.

A broadcast needs every member: workers receive even pushes that they refuse, and losing a member requires a new group.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]  public in its docs

from paceline.devices import collective_backend, finish_work
from paceline.fp8 import WHOLE, KvScales, LayerStacker, Sharding
from paceline.types import PacelineError, PushRefusedError
from paceline.weights.fingerprint import by_worker, dtype_name, fingerprint, reference_fingerprints
from paceline.weights.message import Push, Target, TensorEntry, aligned, check_staged

_BUCKET_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAddress:
    """Rendezvous of a process group."""

    name: str
    host: str
    port: int
    size: int
    """Number of members: the sender and every worker of every engine."""
    timeout_s: float


def host_store(host: str, timeout_s: float) -> TCPStore:
    """Open a store that listens on this address only; by default TCPStore listens on all addresses."""
    listener = socket.create_server((host, 0), backlog=2048)
    return TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )


def join_store(host: str, port: int, timeout_s: float) -> TCPStore:
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))


class DistributedSender:
    """Rank 0 of the group, in the learner's sending rank."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._store: TCPStore | None = None
        self._address: GroupAddress | None = None
        self._group: _ProcessGroup | None = None
        self._staged: list[tuple[TensorEntry, torch.Tensor]] = []

    def host(self, host: str, num_workers: int, timeout_s: float) -> GroupAddress:
        """Create the address of a new group, which replaces the previous one; `join` waits for its workers."""
        self._group = None
        if self._store is None:
            self._store = host_store(host, timeout_s)
        name, port = f"paceline-{secrets.token_hex(8)}", self._store.port
        self._address = GroupAddress(name=name, host=host, port=port, size=1 + num_workers, timeout_s=timeout_s)
        return self._address

    def join(self) -> None:
        assert self._address is not None and self._store is not None, "host comes first"
        self._group = _ProcessGroup(self._address, self._store, rank=0, device=self._device)

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
        """Fingerprint every tensor and keep it until `transmit`. Workers refuse tensors that change until then.

        `quantized` and `sharding` are for FP8 engines, `kv_scales` for engines with an FP8 KV cache.
        """
        assert self._address is not None, "host comes first"
        finish_work(self._device)  # the optimizer's kernels may still be writing
        self._staged = []
        offset = 0
        stacker = LayerStacker(sharding)
        references: list[list[dict[str, str]]] = []
        for name, given in weights:
            tensor = given.detach().to(self._device).contiguous()
            entry = TensorEntry(
                name=name,
                dtype=dtype_name(tensor.dtype),
                shape=tuple(tensor.shape),
                offset=offset,
                num_bytes=tensor.numel() * tensor.element_size(),
                fingerprint=fingerprint(tensor),
            )
            self._staged.append((entry, tensor))
            offset = aligned(offset + entry.num_bytes)
            if quantized and (layer := stacker.add(name, tensor)) is not None:
                references.append(reference_fingerprints(*layer))
        entries = [entry for entry, _ in self._staged]
        check_staged(version, entries)
        return Push(
            version=version,
            target=target,
            transport="distributed",
            channel=self._address.name,
            entries=tuple(entries),
            quantized=by_worker(references),
            kv_scales=kv_scales,
        )

    def transmit(self) -> None:
        """Broadcast the staged tensors while every worker is in `fetch`. After an error the group is unusable."""
        if self._group is None:
            raise PacelineError("weights: the process group is not open")
        staged, self._staged = self._staged, []
        tensors = {entry.name: tensor for entry, tensor in staged}
        finish_work(self._device)  # NCCL's stream must not read before the copies of staging end
        try:
            for bucket in _buckets([entry for entry, _ in staged]):
                start = bucket[0].offset
                packed = torch.empty(_end(bucket) - start, dtype=torch.uint8, device=self._device)
                for entry in bucket:
                    room = packed[entry.offset - start : entry.offset - start + entry.num_bytes]
                    room.copy_(tensors[entry.name].reshape(-1).view(torch.uint8))
                self._group.broadcast(packed)
        except RuntimeError as error:
            self._group = None
            raise PacelineError(f"weights: the broadcast failed: {error}") from error

    def close(self) -> None:
        self._group = self._store = None
        self._staged = []


class DistributedReceiver:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._group: _ProcessGroup | None = None
        self._name = ""

    def join(self, address: GroupAddress, rank: int) -> None:
        """Join the sender's group, which replaces the previous one; wait for all its members."""
        self.close()
        store = join_store(address.host, address.port, address.timeout_s)
        self._group = _ProcessGroup(address, store, rank=rank, device=self._device)
        self._name = address.name

    def fetch(self, push: Push) -> torch.Tensor:
        """Receive the bytes of a push into new memory."""
        if self._group is None or push.channel != self._name:
            raise PushRefusedError(f"group {push.channel}: this engine has not joined it")
        memory = torch.empty(push.extent, dtype=torch.uint8, device=self._device)
        try:
            for bucket in _buckets(push.entries):
                self._group.broadcast(memory[bucket[0].offset : _end(bucket)])
        except RuntimeError as error:
            self.close()
            raise PushRefusedError(f"group {push.channel}: the bytes did not arrive: {error}") from error
        return memory

    def close(self) -> None:
        self._group, self._name = None, ""


class _ProcessGroup:
    """A process group apart from the default one."""

    def __init__(self, address: GroupAddress, store: Store, *, rank: int, device: torch.device) -> None:
        shared, timeout = PrefixStore(address.name, store), timedelta(seconds=address.timeout_s)
        if collective_backend(device) == "nccl":
            nccl = dist.ProcessGroupNCCL  # pyright: ignore[reportAttributeAccessIssue]  CPU builds lack it
            options = nccl.Options()
            options._timeout = timeout  # as init_process_group does
            self._group: Any = nccl(shared, rank, address.size, options)
        else:
            self._group = dist.ProcessGroupGloo(shared, rank, address.size, timeout)
        self._store = store  # the group uses it throughout its life

    def broadcast(self, memory: torch.Tensor) -> None:
        """Broadcast from rank 0; raise RuntimeError if a member is gone or too slow."""
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._group.broadcast([memory], options).wait()


def _buckets(entries: Sequence[TensorEntry]) -> Iterator[list[TensorEntry]]:
    """Yield consecutive tensors for one broadcast each, the same for sender and workers."""
    bucket: list[TensorEntry] = []
    for entry in entries:
        if entry.num_bytes == 0:
            continue
        bucket.append(entry)
        if _end(bucket) - bucket[0].offset >= _BUCKET_BYTES:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


def _end(bucket: Sequence[TensorEntry]) -> int:
    return bucket[-1].offset + bucket[-1].num_bytes
