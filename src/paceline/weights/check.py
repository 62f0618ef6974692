"""Check a whole push against the engine's checkpoint before it changes the model."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
import xxhash
from safetensors import safe_open

from paceline.types import PushRefusedError
from paceline.weights.fingerprint import BLOCK_BYTES, Bytes, device_fingerprint, dtype_name, hash_threads, seal
from paceline.weights.message import Push, TensorEntry

# Unsigned and signed integer types of the same width, and the smallest non-finite bit pattern (exponent all ones).
_NOT_FINITE: Mapping[str, tuple[type[np.unsignedinteger[Any]], type[np.signedinteger[Any]], int]] = {
    "float64": (np.uint64, np.int64, 0x7FF0_0000_0000_0000),
    "float32": (np.uint32, np.int32, 0x7F80_0000),
    "bfloat16": (np.uint16, np.int16, 0x7F80),
    "float16": (np.uint16, np.int16, 0x7C00),
    "float8_e5m2": (np.uint8, np.int8, 0x7C),
    "float8_e4m3fn": (np.uint8, np.int8, 0x7F),
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Dtype and shape of a tensor in a checkpoint."""

    dtype: str
    shape: tuple[int, ...]


class TensorFile(Protocol):
    """Typed subset of safetensors' `safe_open`."""

    def keys(self) -> list[str]: ...

    def get_tensor(self, name: str) -> torch.Tensor: ...


def _weight_map(directory: Path) -> dict[str, str]:
    """Return the file of each tensor by the checkpoint's index; empty without an index."""
    index = directory / "model.safetensors.index.json"
    return json.loads(index.read_text())["weight_map"] if index.is_file() else {}


def checkpoint_files(directory: Path) -> list[Path]:
    # Some repositories have the same weights twice under other file names; the index lists the files that count.
    listed = sorted(set(_weight_map(directory).values()))
    return [directory / name for name in listed] or sorted(directory.glob("*.safetensors"))


def open_files(directory: Path) -> Iterator[TensorFile]:
    """Open the safetensors files of a checkpoint one after the other."""
    for file in checkpoint_files(directory):
        with cast("AbstractContextManager[TensorFile]", safe_open(file, "pt")) as tensors:
            yield tensors


def tensor_names(directory: Path) -> set[str]:
    """Return the tensor names of a checkpoint from its index, which needs no weight files, or from file headers."""
    return set(_weight_map(directory)) or {name for tensors in open_files(directory) for name in tensors.keys()}  # noqa: SIM118  not a mapping


def inventory(checkpoint: str | Path) -> dict[str, TensorSpec]:
    """Return the tensors of a checkpoint, reading only file headers."""
    directory = Path(checkpoint)
    if not checkpoint_files(directory):
        raise ValueError(
            f"model: got {directory}; must be a local directory with safetensors files because pushes are checked "
            "against it"
        )
    specs: dict[str, TensorSpec] = {}
    for tensors in open_files(directory):
        for name in tensors.keys():  # noqa: SIM118  not a mapping
            tensor = tensors.get_tensor(name)
            specs[name] = TensorSpec(dtype_name(tensor.dtype), tuple(tensor.shape))
    return specs


def check_precision(push: Push, *, fp8_weights: bool, num_workers: int, num_kv_scales: int) -> None:
    """Refuse a push for another precision or sharding, and KV scales of other weights.

    `num_kv_scales` is the number of layers with an FP8 KV cache.
    """
    if fp8_weights != bool(push.quantized):
        precision = "FP8" if push.quantized else "full precision"
        raise PushRefusedError(f"weights: staged for an engine in {precision}, unlike this one")
    if fp8_weights and len(push.quantized) != num_workers:
        raise PushRefusedError(
            f"weights: staged in FP8 for {len(push.quantized)} tensor-parallel workers; must be for {num_workers}"
        )
    scales = push.kv_scales
    if (num_sent := 0 if scales is None else len(scales.k)) != num_kv_scales:
        raise PushRefusedError(
            f"kv_scales: got {num_sent}; must be {num_kv_scales}, one for each layer with an FP8 KV cache"
        )
    if scales is not None and scales.version != push.version:
        raise PushRefusedError(
            f"kv_scales: calibrated for version {scales.version}; must be of version {push.version} because KV ranges "
            "depend on the weights"
        )


def check_push(push: Push, expected: Mapping[str, TensorSpec], memory: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Check and return the tensors of a push; raise PushRefusedError with the name of the first bad one.

    The tensors are views of `memory`, so keeping one keeps the memory of the whole push.
    """
    _check_inventory(push, expected, memory.numel())
    tensors = [(entry.name, _view(entry, memory)) for entry in push.entries]
    with ThreadPoolExecutor(hash_threads(), thread_name_prefix="paceline-verify") as threads:
        problems = threads.map(_problem, push.entries, (tensor for _, tensor in tensors))
        for entry, problem in zip(push.entries, problems, strict=True):
            if problem is not None:
                raise PushRefusedError(f"{entry.name}: {problem}")
    return tensors


def _check_inventory(push: Push, expected: Mapping[str, TensorSpec], size: int) -> None:
    seen: set[str] = set()
    for entry in push.entries:
        if entry.name not in expected:
            raise PushRefusedError(f"{entry.name}: unknown; the {push.target}'s checkpoint has no such tensor")
        if entry.name in seen:
            raise PushRefusedError(f"{entry.name}: sent twice")
        if (problem := _misfit(entry, expected[entry.name], size)) is not None:
            raise PushRefusedError(f"{entry.name}: {problem}")
        seen.add(entry.name)
    for name in expected:
        if name not in seen:
            raise PushRefusedError(f"{name}: missing from the push")


def _misfit(entry: TensorEntry, spec: TensorSpec, size: int) -> str | None:
    if entry.shape != spec.shape:
        return f"got shape {list(entry.shape)}; must be {list(spec.shape)}"
    # The engine converts between float types while loading, but not between floats and integers.
    if entry.dtype != spec.dtype and not (entry.dtype in _NOT_FINITE and spec.dtype in _NOT_FINITE):
        return f"got dtype {entry.dtype}; must be {spec.dtype}"
    width = _dtype(entry).itemsize
    misplaced = entry.offset < 0 or entry.offset % width or entry.offset + entry.num_bytes > size
    if entry.num_bytes != math.prod(entry.shape) * width or misplaced:
        return f"got {entry.num_bytes} bytes at offset {entry.offset}; must fit shape and alignment of {entry.dtype}"
    return None


def _problem(entry: TensorEntry, tensor: torch.Tensor) -> str | None:
    """Return the problem with the bytes of one tensor, if any; on the CPU in a single pass over memory."""
    if tensor.device.type == "cpu":
        found, finite = _read_once(entry, tensor.reshape(-1).view(torch.uint8).numpy())
    else:
        wide = tensor.float() if tensor.is_floating_point() and tensor.element_size() == 1 else tensor
        found, finite = device_fingerprint(tensor), bool(torch.isfinite(wide).all())
    if found != entry.fingerprint:
        return f"fingerprint is {found}; must be the sender's {entry.fingerprint}: its bytes changed on the way"
    return None if finite else "holds a NaN or an infinity"


def _read_once(entry: TensorEntry, raw: Bytes) -> tuple[str, bool]:
    """Return the fingerprint, and whether all values are finite."""
    digest = xxhash.xxh3_128()
    finite = True
    for start in range(0, len(raw), BLOCK_BYTES):
        block = raw[start : start + BLOCK_BYTES]
        # In this order: the maxima read a block from memory faster than the hash, which then reads it from the cache.
        finite = finite and _is_finite(block, entry.dtype)
        digest.update(block.data)
    return seal(digest, entry.dtype, entry.shape), finite


def _is_finite(block: Bytes, dtype: str) -> bool:
    """Check with two maxima over bit patterns, far cheaper than `torch.isfinite`: positive infinity and NaNs are the
    largest signed integers, negative ones the largest unsigned integers."""
    if dtype not in _NOT_FINITE:
        return True
    unsigned, signed, first = _NOT_FINITE[dtype]
    sign = 1 << (8 * np.dtype(unsigned).itemsize - 1)
    return int(block.view(signed).max()) < first and int(block.view(unsigned).max()) < sign + first


def _dtype(entry: TensorEntry) -> torch.dtype:
    return getattr(torch, entry.dtype)


def _view(entry: TensorEntry, memory: torch.Tensor) -> torch.Tensor:
    return memory[entry.offset : entry.offset + entry.num_bytes].view(_dtype(entry)).view(entry.shape)
