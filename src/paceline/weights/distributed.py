"""torch.distributed as a transport: the learner broadcasts the bytes of a push to all engines' workers.

Sender and workers form a process group of their own, made from a TCPStore that the sender hosts: not the default group,
which FSDP uses in the learner and vLLM in the engine. gloo carries tensors on the CPU, NCCL those on GPUs; only gloo
has been run.

    sender      host ─▶ join ──────────────────── stage ─▶ transmit ─▶ transmit ...
    worker              join(rank) ── message by rpc ─────▶ fetch    ─▶ fetch   ...

Memory: the sender keeps the staged tensors until they are sent, and one bucket of them. A worker holds a whole push
beside its model, on its own device, until it has loaded it: only then can a push be refused as a whole. Loading bucket
by bucket would need less and is left for later.

A broadcast needs every member. So a worker takes the bytes of every push, also of one that it will refuse, and a group
that has lost a member is made anew. Until then nobody waits longer than the group's timeout.
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
    """Where a group meets."""

    name: str
    host: str
    port: int
    size: int
    """Members: the sender and every worker of every engine."""
    timeout_s: float


def host_store(host: str, timeout_s: float) -> TCPStore:
    """A store that processes meet at, open on this address only; TCPStore by itself listens on all of the machine's."""
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
    """Rank 0 of the group. Only the learner's rank that sends makes one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._store: TCPStore | None = None
        self._address: GroupAddress | None = None
        self._group: _ProcessGroup | None = None
        self._staged: list[tuple[TensorEntry, torch.Tensor]] = []

    def host(self, host: str, num_workers: int, timeout_s: float) -> GroupAddress:
        """Open a new group for so many workers, in place of the last one; `join` waits for them."""
        self._group = None
        if self._store is None:
            self._store = host_store(host, timeout_s)
        name = f"paceline-{secrets.token_hex(8)}"
        self._address = GroupAddress(
            name=name, host=host, port=self._store.port, size=1 + num_workers, timeout_s=timeout_s
        )
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
        quantised: bool = False,
        sharding: Sharding = WHOLE,
        kv_scales: KvScales | None = None,
    ) -> Push:
        """Fingerprint every tensor and keep it until `transmit`. A tensor that changes until then is refused by the
        workers.

        `quantised` is for engines in FP8, split by `sharding`, and `kv_scales` for those with an FP8 KV cache.
        """
        assert self._address is not None, "host comes first"
        finish_work(self._device)  # the optimizer's kernels may still be writing what is about to be read
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
            if quantised and (layer := stacker.add(name, tensor)) is not None:
                references.append(reference_fingerprints(*layer))
        entries = [entry for entry, _ in self._staged]
        check_staged(version, entries)
        return Push(
            version=version,
            target=target,
            transport="distributed",
            channel=self._address.name,
            entries=tuple(entries),
            quantised=by_worker(references),
            kv_scales=kv_scales,
        )

    def transmit(self) -> None:
        """Broadcast what is staged, while every worker is in `fetch`. After an error the group is of no use any
        more."""
        if self._group is None:
            raise PacelineError("weights: the process group is not open")
        staged, self._staged = self._staged, []
        tensors = {entry.name: tensor for entry, tensor in staged}
        finish_work(self._device)  # what staging copied is there before NCCL's stream reads it
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
    """One worker of one engine."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._group: _ProcessGroup | None = None
        self._name = ""

    def join(self, address: GroupAddress, rank: int) -> None:
        """Join the sender's group, in place of the last one; returns when all its members have."""
        self.close()
        store = join_store(address.host, address.port, address.timeout_s)
        self._group = _ProcessGroup(address, store, rank=rank, device=self._device)
        self._name = address.name

    def fetch(self, push: Push) -> torch.Tensor:
        """The bytes of a push, in memory of their own."""
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
    """A process group that is nobody's default group."""

    def __init__(self, address: GroupAddress, store: Store, *, rank: int, device: torch.device) -> None:
        shared, timeout = PrefixStore(address.name, store), timedelta(seconds=address.timeout_s)
        if collective_backend(device) == "nccl":
            nccl = dist.ProcessGroupNCCL  # pyright: ignore[reportAttributeAccessIssue]  builds for the CPU have none
            options = nccl.Options()
            options._timeout = timeout  # how torch's own init_process_group sets it
            self._group: Any = nccl(shared, rank, address.size, options)
        else:
            self._group = dist.ProcessGroupGloo(shared, rank, address.size, timeout)
        self._store = store  # the group asks it for as long as it lives

    def broadcast(self, memory: torch.Tensor) -> None:
        """From rank 0 to all others. Raises RuntimeError if one of them is gone or too slow."""
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._group.broadcast([memory], options).wait()


def _buckets(entries: Sequence[TensorEntry]) -> Iterator[list[TensorEntry]]:
    """Consecutive tensors that travel in one broadcast. Sender and workers cut alike, from the same entries."""
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
