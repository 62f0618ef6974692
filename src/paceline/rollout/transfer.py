"""Both ends of the weight wire: what a learner stages in shared memory, an engine checks as a whole before it touches its model.

    learner's process                                     engine's worker (through backends.py)
    ShmSender.stage ── bytes ──▶ segment in /dev/shm ──▶ ShmReceiver.check ──▶ vLLM's layerwise reload
          │                                                    │
          └─ Push: version, target, one entry per tensor ─▶ deliver ◀─ PushReport: what was refused, or what is held now

Every tensor has a fingerprint over its bytes, dtype and shape, taken by the sender and again at the far end. A push in which one
tensor is unknown, missing, misshapen, damaged or not finite is refused by that tensor's name, and the engine keeps the version
that it had. There is one segment per target, so the drafter is a second session over the same wire.

An engine in FP8 gets the same BF16 bytes and quantises them as it loads. The sender quantises them too, by the reference in
precision.py, and sends fingerprints of what must come out; an engine with an FP8 KV cache also gets its scales. What the engine
then holds is read from where its kernels read it, and compared with the sender's like every other fingerprint.

The segment is reused: `stage` must not run before every engine has answered to the push before. An engine that reads while it is
overwritten sees wrong fingerprints and refuses.

This module does not import vllm, because the sending end lives in the learner's process. vLLM's TrainerWeightTransferEngine is not
subclassed: it drives all engines through one synchronous client and gives nothing back; here each engine answers with a receipt.
"""

from __future__ import annotations

import fcntl
import json
import math
import mmap
import os
import secrets
import time
import warnings
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from paceline.precision import KvScales, LayerStacker, quantise_blocks
from paceline.types import PacelineError, PushRefusedError, Receipt

Target = Literal["policy", "drafter"]
Bytes = npt.NDArray[np.uint8]

_SHM = Path("/dev/shm")  # noqa: S108  shared memory is the point; files in it are 0600 and have random names
_PREFIX = "paceline-"
_ALIGNMENT = 64
# Copying, hashing and checking go block by block, so that the second pass over a block finds it in the core's own cache.
_BLOCK_BYTES = 512 * 1024
# The segment grows by whole extents; a larger tensor gets an extent of its own.
_EXTENT_BYTES = 16 * 1024 * 1024

_SAFETENSORS_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _SAFETENSORS_DTYPES.values()}
# Integer types of the same width, unsigned and signed, and the smallest pattern that is not finite (exponent all ones).
_NOT_FINITE: Mapping[str, tuple[type[np.unsignedinteger[Any]], type[np.signedinteger[Any]], int]] = {
    "float64": (np.uint64, np.int64, 0x7FF0_0000_0000_0000),
    "float32": (np.uint32, np.int32, 0x7F80_0000),
    "bfloat16": (np.uint16, np.int16, 0x7F80),
    "float16": (np.uint16, np.int16, 0x7C00),
    "float8_e5m2": (np.uint8, np.int8, 0x7C),
    "float8_e4m3fn": (np.uint8, np.int8, 0x7F),
}


# What crosses the wire


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """Where one tensor lies in the segment and what it must be.

    Example: TensorEntry(name="model.norm.weight", dtype="bfloat16", shape=(256,), offset=64, num_bytes=512, fingerprint="9f…")
    """

    name: str
    dtype: str
    """As torch spells it, without `torch.`."""
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """One version of one model, staged and ready to be read."""

    version: int
    target: Target
    segment: str
    """Name of the file in /dev/shm."""
    entries: tuple[TensorEntry, ...]
    quantised: Mapping[str, str] = field(default_factory=dict)
    """Fingerprints of what an FP8 engine must make of it: weight and scales of every quantised layer. Empty for other engines."""
    kv_scales: KvScales | None = None
    """For an engine with an FP8 KV cache."""

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries)

    @property
    def fingerprints(self) -> dict[str, str]:
        """Of everything that the engine must hold after this push."""
        scales = {} if self.kv_scales is None else self.kv_scales.named()
        arrived = {entry.name: entry.fingerprint for entry in self.entries}
        return arrived | dict(self.quantised) | {name: scale_fingerprint(scale) for name, scale in scales.items()}

    def to_dict(self) -> dict[str, Any]:
        """Plain types only: vLLM's rpc carries no classes without pickle."""
        return asdict(self)

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Push:
        entries = tuple(TensorEntry(**{**entry, "shape": tuple(entry["shape"])}) for entry in plain["entries"])
        scales = plain["kv_scales"]
        return cls(
            version=plain["version"],
            target=plain["target"],
            segment=plain["segment"],
            entries=entries,
            quantised=plain["quantised"],
            kv_scales=None if scales is None else KvScales(version=scales["version"], **{x: tuple(scales[x]) for x in "qkv"}),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PushReport:
    """What one worker says after a push."""

    version: int | None
    """None when vLLM's own GPU backends carried it, whose messages have no version."""
    refused: str | None = None
    """Why the push was refused; None when it was applied."""
    fingerprints: Mapping[str, str]
    """Of everything of this push that the model holds now, quantised layers and KV scales included; empty after a refusal."""
    verify_s: float = 0.0
    load_s: float = 0.0
    """vLLM's own loading: packing, quantising, copying into place."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> PushReport:
        return cls(**plain)


# Fingerprints


def fingerprint(tensor: torch.Tensor) -> str:
    """128 bits over a tensor's bytes, dtype and shape. Both ends of a wire take it on the same kind of device."""
    if tensor.device.type != "cpu":
        return device_fingerprint(tensor)
    return _seal(xxhash.xxh3_128(_bytes(tensor).data), _dtype_name(tensor.dtype), tensor.shape)


def device_fingerprint(tensor: torch.Tensor) -> str:
    """As `fingerprint`, in torch operations only, for tensors that should not leave a GPU. Not run on a GPU yet.

    Two sums modulo 2**64 over 8-byte words w_i: w_i * (2i + 1) and w_i * (2i**2 + 1). Weights are odd, hence a change of one word
    always changes both sums; they depend on i, hence so does an exchange of two. It detects accidents, not an adversary.
    """
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    words = torch.nn.functional.pad(raw, (0, -raw.numel() % 8)).view(torch.int64)
    linear = quadratic = 0
    step = 1 << 22  # bounds the memory of the positions
    for start in range(0, words.numel(), step):
        part = words[start : start + step]
        position = torch.arange(start, start + part.numel(), dtype=torch.int64, device=part.device)
        linear += int((part * (2 * position + 1)).sum())
        quadratic += int((part * (2 * position * position + 1)).sum())
    sums = (linear % 2**64).to_bytes(8, "little") + (quadratic % 2**64).to_bytes(8, "little")
    return _seal(xxhash.xxh3_128(sums), _dtype_name(tensor.dtype), tensor.shape)


def scale_fingerprint(scale: float) -> str:
    """Its bits as a float32."""
    return np.float32(scale).tobytes().hex()


def quantised_fingerprints(layer: str, codes_NK: torch.Tensor, scale: torch.Tensor) -> dict[str, str]:
    """Of one quantised layer, under names that no tensor of a checkpoint has."""
    return {f"{layer}.weight.fp8": fingerprint(codes_NK), f"{layer}.weight.scale": fingerprint(scale)}


def mismatched(sent: Mapping[str, str], held: Mapping[str, str]) -> tuple[str, ...]:
    """Names of tensors that are not held, or held with another fingerprint than the sender's, or held without having been sent."""
    return tuple(sorted(name for name in sent.keys() | held.keys() if sent.get(name) != held.get(name)))


def _seal(digest: xxhash.xxh3_128, dtype: str, shape: Sequence[int]) -> str:
    # The header comes last: in front it would shift every block of the hash off its alignment.
    digest.update(f"{dtype}{list(shape)}".encode())
    return digest.hexdigest()


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _bytes(tensor: torch.Tensor) -> Bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _num_threads() -> int:
    """Two threads saturate memory on the machines seen; an engine that is bound to one core has one."""
    return min(2, len(os.sched_getaffinity(0)))


# The sending end


class ShmSender:
    """Owns one segment per target. Only the rank that sends makes one; the others call `take_part`."""

    def __init__(self) -> None:
        sweep()
        self._segments: dict[Target, _Segment] = {}
        self._threads = ThreadPoolExecutor(_num_threads(), thread_name_prefix="paceline-stage")

    def stage(
        self,
        version: int,
        weights: Iterable[tuple[str, torch.Tensor]],
        target: Target = "policy",
        *,
        quantised: bool = False,
        kv_scales: KvScales | None = None,
    ) -> Push:
        """Copy every tensor into the segment, in the dtype in which it comes, and fingerprint it on the way.

        At most a few tensors are held at a time, so gathering them one by one from shards costs the memory of a few. `quantised`
        is for engines in FP8, and `kv_scales` for those with an FP8 KV cache.
        """
        if version < 0:
            raise ValueError(f"version: got {version}; must be 0 or more because versions count policy updates")
        segment = self._segments.get(target)
        if segment is None:
            segment = self._segments[target] = _Segment(target)
        segment.rewind()
        entries: list[TensorEntry] = []
        pending: deque[Future[TensorEntry]] = deque()
        stacker = LayerStacker()
        references: list[Future[dict[str, str]]] = []
        for name, tensor in weights:
            num_bytes = tensor.numel() * tensor.element_size()
            offset, room = segment.reserve(num_bytes)
            pending.append(self._threads.submit(_stage_tensor, name, tensor, offset, room))
            if quantised and (layer := stacker.add(name, tensor)) is not None:
                references.append(self._threads.submit(_reference, *layer))
            if len(pending) > 4:
                entries.append(pending.popleft().result())
        entries.extend(future.result() for future in pending)
        if not entries:
            raise ValueError("weights: got no tensor; must be the whole model because an engine refuses a part of it")
        return Push(
            version=version,
            target=target,
            segment=segment.name,
            entries=tuple(entries),
            quantised={name: value for reference in references for name, value in reference.result().items()},
            kv_scales=kv_scales,
        )

    def close(self) -> None:
        """Remove the segments. Engines that still map one keep the memory alive until they map another or end."""
        self._threads.shutdown()
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()


def take_part(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """What a rank that does not send does while rank 0 stages: gathering is collective, so it takes every tensor and drops it."""
    deque(weights, maxlen=0)


def sweep() -> list[str]:
    """Remove segments whose owner is dead, for nobody else can after a SIGKILL; returns their names.

    An owner holds a lock on its segment for as long as it lives. A lock, unlike a process id in the name, is also right across
    containers that share /dev/shm.
    """
    removed = []
    for path in _SHM.glob(f"{_PREFIX}*"):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except (FileNotFoundError, PermissionError):
            continue  # removed meanwhile, or another user's
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            removed.append(path.name)
        except BlockingIOError:
            pass  # its owner lives
        finally:
            os.close(descriptor)
    return removed


class _Segment:
    """A locked file in shared memory that grows by extents, each mapped and faulted in once."""

    def __init__(self, target: Target) -> None:
        self.name = f"{_PREFIX}{os.getpid()}-{target}-{secrets.token_hex(8)}"
        path, unseen = _SHM / self.name, _SHM / f".{self.name}"
        self._descriptor = os.open(unseen, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        unseen.rename(path)  # only now: `sweep` in another process must never find it unlocked
        self._finalizer = weakref.finalize(self, _remove, path, self._descriptor, os.getpid())
        self._extents: list[tuple[int, Bytes]] = []
        self._size = 0
        self._extent = 0
        self._cursor = 0

    def rewind(self) -> None:
        self._extent = 0
        self._cursor = 0

    def reserve(self, num_bytes: int) -> tuple[int, Bytes]:
        """Offset in the file and writable memory for the next tensor. Equal inventories get equal offsets at every push."""
        while self._extent < len(self._extents):
            start, memory = self._extents[self._extent]
            if self._cursor + num_bytes <= len(memory):
                place = self._cursor
                self._cursor = -(-(place + num_bytes) // _ALIGNMENT) * _ALIGNMENT
                return start + place, memory[place : place + num_bytes]
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
            # Allocated here, where lack of room is an error that can be told: writing to a sparse file would end in SIGBUS.
            os.posix_fallocate(self._descriptor, self._size, size)
        except OSError as error:
            free = os.statvfs(_SHM)
            raise PacelineError(
                f"{_SHM}: {(self._size + size) / 1e9:.2f} GB needed for the weights, {free.f_bavail * free.f_frsize / 1e9:.2f} GB "
                f"left ({error.strerror}); enlarge it (docker run --shm-size)"
            ) from error
        memory = mmap.mmap(self._descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, offset=self._size)
        self._extents.append((self._size, np.frombuffer(memory, np.uint8)))
        self._size += size


def _remove(path: Path, descriptor: int, owner_pid: int) -> None:
    if os.getpid() == owner_pid:  # a forked child inherits this call and must not take the segment from its parent
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _stage_tensor(name: str, tensor: torch.Tensor, offset: int, room: Bytes) -> TensorEntry:
    source = _bytes(tensor)
    digest = xxhash.xxh3_128()
    for start in range(0, len(room), _BLOCK_BYTES):
        block = room[start : start + _BLOCK_BYTES]
        np.copyto(block, source[start : start + _BLOCK_BYTES])
        digest.update(block.data)
    dtype = _dtype_name(tensor.dtype)
    sealed = _seal(digest, dtype, tensor.shape)
    return TensorEntry(name=name, dtype=dtype, shape=tuple(tensor.shape), offset=offset, num_bytes=len(room), fingerprint=sealed)


def _reference(layer: str, weight_NK: torch.Tensor) -> dict[str, str]:
    quantised = quantise_blocks(weight_NK)
    return quantised_fingerprints(layer, quantised.codes_NK, quantised.scale)


# The receiving end


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a checkpoint says about a tensor."""

    dtype: str
    shape: tuple[int, ...]


class ShmReceiver:
    """Maps segments and checks pushes against the inventory of the checkpoint that the engine was started from."""

    def __init__(self) -> None:
        self._mapped: dict[Target, tuple[str, torch.Tensor]] = {}

    def check(self, push: Push, expected: Mapping[str, TensorSpec]) -> list[tuple[str, torch.Tensor]]:
        """The tensors of a push, all of them checked; raises PushRefusedError that begins with the name of the first bad one.

        The tensors are read-only views of the segment: whoever keeps one keeps memory that the next push overwrites.
        """
        _check_inventory(push, expected)
        memory = self._map(push)
        raw = memory.numpy()
        with ThreadPoolExecutor(_num_threads(), thread_name_prefix="paceline-verify") as threads:
            problems = threads.map(lambda entry: _problem(entry, raw), push.entries)
            for entry, problem in zip(push.entries, problems, strict=True):
                if problem is not None:
                    raise PushRefusedError(f"{entry.name}: {problem}")
        return [(entry.name, _view(entry, memory)) for entry in push.entries]

    def close(self) -> None:
        self._mapped.clear()

    def _map(self, push: Push) -> torch.Tensor:
        size = max(entry.offset + entry.num_bytes for entry in push.entries)
        name, memory = self._mapped.get(push.target, ("", torch.empty(0, dtype=torch.uint8)))
        if name != push.segment or memory.numel() < size:
            self._mapped.pop(push.target, None)
            memory = _map_segment(push.segment, size)
            self._mapped[push.target] = (push.segment, memory)
        return memory


def inventory(checkpoint: str | Path) -> dict[str, TensorSpec]:
    """The tensors of a checkpoint, from the headers of its safetensors files."""
    directory = Path(checkpoint)
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        # Some repositories hold the same weights twice under other file names; the index says which files count.
        files = [directory / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    else:
        files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ValueError(
            f"model: got {directory}; must be a local directory with safetensors files because pushes are checked against it"
        )
    specs: dict[str, TensorSpec] = {}
    for file in files:
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        for name, tensor in header.items():
            if name != "__metadata__":
                specs[name] = TensorSpec(_dtype_name(_SAFETENSORS_DTYPES[tensor["dtype"]]), tuple(tensor["shape"]))
    return specs


def check_precision(push: Push, *, fp8_weights: bool, num_kv_scales: int) -> None:
    """Refuse a policy that was staged for engines of another precision, and scales that belong to other weights.

    `num_kv_scales` is the number of layers with an FP8 KV cache.
    """
    if fp8_weights != bool(push.quantised):
        precision = "FP8" if push.quantised else "full precision"
        raise PushRefusedError(f"weights: staged for an engine in {precision}, which this one is not")
    scales = push.kv_scales
    if (num_sent := 0 if scales is None else len(scales.k)) != num_kv_scales:
        raise PushRefusedError(f"kv_scales: got {num_sent}; must be {num_kv_scales}, one for each layer with an FP8 KV cache")
    if scales is not None and scales.version != push.version:
        raise PushRefusedError(
            f"kv_scales: calibrated for version {scales.version}; must be of version {push.version}, because other weights "
            "have other keys"
        )


def _check_inventory(push: Push, expected: Mapping[str, TensorSpec]) -> None:
    seen: set[str] = set()
    for entry in push.entries:
        if entry.name not in expected:
            raise PushRefusedError(f"{entry.name}: unknown; the {push.target}'s checkpoint has no such tensor")
        if entry.name in seen:
            raise PushRefusedError(f"{entry.name}: sent twice")
        if (problem := _misfit(entry, expected[entry.name])) is not None:
            raise PushRefusedError(f"{entry.name}: {problem}")
        seen.add(entry.name)
    for name in expected:
        if name not in seen:
            raise PushRefusedError(f"{name}: missing from the push")


def _misfit(entry: TensorEntry, spec: TensorSpec) -> str | None:
    if entry.shape != spec.shape:
        return f"got shape {list(entry.shape)}; must be {list(spec.shape)}"
    # The engine converts between float types as it loads; a float where indices belong (or the reverse) is another tensor.
    if entry.dtype != spec.dtype and not (entry.dtype in _NOT_FINITE and spec.dtype in _NOT_FINITE):
        return f"got dtype {entry.dtype}; must be {spec.dtype}"
    width = _DTYPES[entry.dtype].itemsize
    if entry.num_bytes != math.prod(entry.shape) * width or entry.offset < 0 or entry.offset % width:
        return f"got {entry.num_bytes} bytes at offset {entry.offset}, where no {entry.dtype} of that shape can be"
    return None


def _map_segment(name: str, size: int) -> torch.Tensor:
    if not name.startswith(_PREFIX) or "/" in name:
        raise PushRefusedError(f"segment {name!r}: must be a file in {_SHM} that begins with {_PREFIX!r}")
    try:
        descriptor = os.open(_SHM / name, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise PushRefusedError(f"segment {name}: {error.strerror}; sender and engine must share {_SHM}") from error
    try:
        length = os.fstat(descriptor).st_size
        if length < size:  # reading past the end of a file is SIGBUS, which no one can catch
            raise PushRefusedError(f"segment {name}: got {length} bytes; must be at least {size}")
        # Read-only: a loader that worked in place would change the weights under the other engines, and must rather fail.
        memory = mmap.mmap(descriptor, length, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(memory, dtype=torch.uint8)


def _problem(entry: TensorEntry, raw: Bytes) -> str | None:
    """What is wrong with the bytes of one tensor, found in a single pass over memory."""
    room = raw[entry.offset : entry.offset + entry.num_bytes]
    digest = xxhash.xxh3_128()
    finite = True
    for start in range(0, len(room), _BLOCK_BYTES):
        block = room[start : start + _BLOCK_BYTES]
        # In this order: the maxima draw a block from memory faster than the hash, which then finds it in the cache.
        finite = finite and _is_finite(block, entry.dtype)
        digest.update(block.data)
    found = _seal(digest, entry.dtype, entry.shape)
    if found != entry.fingerprint:
        return f"fingerprint is {found}; must be {entry.fingerprint}, which the sender took: its bytes changed on the way"
    if not finite:
        return "holds a NaN or an infinity"
    return None


def _is_finite(block: Bytes, dtype: str) -> bool:
    """Two maxima over bit patterns, far cheaper than `torch.isfinite`: read as signed integers the positive infinity and NaNs
    are the largest, read as unsigned the negative ones are. Tested against torch over every 16-bit pattern."""
    if dtype not in _NOT_FINITE:
        return True
    unsigned, signed, first = _NOT_FINITE[dtype]
    sign = 1 << (8 * np.dtype(unsigned).itemsize - 1)
    return int(block.view(signed).max()) < first and int(block.view(unsigned).max()) < sign + first


def _view(entry: TensorEntry, memory: torch.Tensor) -> torch.Tensor:
    return memory[entry.offset : entry.offset + entry.num_bytes].view(_DTYPES[entry.dtype]).view(entry.shape)


# Between the ends


class PushTarget(Protocol):
    """The part of `VllmEngine` that a push needs."""

    @property
    def name(self) -> str: ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def rpc(self, method: str, *args: Any) -> list[Any]: ...

    async def on_new_weights(self, version: int) -> None: ...


async def deliver(engine: PushTarget, push: Push) -> Receipt:
    """Give one push to one engine, between two of its steps, and say how it went. Never raises for the engine's fault.

    The engine runs again when this returns, with the new version or, after a refusal, with the one it had. With `lost` it does
    neither: it stays paused and may hold anything.
    """
    started_s = time.monotonic()

    def receipt(*, error: str | None = None, lost: bool = False, names: tuple[str, ...] = ()) -> Receipt:
        return Receipt(
            engine=engine.name,
            version=push.version,
            num_tensors=len(push.entries),
            num_bytes=push.num_bytes,
            seconds=time.monotonic() - started_s,
            scales_version=None if push.kv_scales is None else push.kv_scales.version,
            mismatched=names,
            error=error,
            lost=lost,
        )

    try:
        await engine.pause()
        reports = [PushReport.from_dict(plain) for plain in await engine.rpc("receive_push", push.to_dict())]
        refusals = [report.refused for report in reports if report.refused is not None]
        if refusals and len(refusals) == len(reports):
            await engine.resume()
            return receipt(error=refusals[0])
        if refusals:
            return receipt(error=f"only some of the engine's workers refused: {refusals[0]}", lost=True)
        names = tuple(sorted({name for report in reports for name in mismatched(push.fingerprints, report.fingerprints)}))
        if names:
            return receipt(error=f"{names[0]}: held with another fingerprint than the sender's", lost=True, names=names)
        if push.target == "policy":
            await engine.on_new_weights(push.version)
        await engine.resume()
        return receipt()
    except Exception as error:  # noqa: BLE001  whatever goes wrong after the pause leaves an engine that nobody can vouch for
        return receipt(error=f"{type(error).__name__}: {error}", lost=True)
