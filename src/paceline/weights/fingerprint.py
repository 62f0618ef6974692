"""Fingerprints of tensors, 128 bits over bytes, dtype and shape: sender and receiver must find the same."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from paceline.fp8 import quantise_blocks

Bytes = npt.NDArray[np.uint8]

# Copying, hashing and checking go block by block, so that the second pass over a block finds it in the core's own
# cache.
BLOCK_BYTES = 512 * 1024


def hash_threads() -> int:
    """Two threads saturate memory on the machines seen; an engine that is bound to one core has one."""
    return min(2, len(os.sched_getaffinity(0)))


def fingerprint(tensor: torch.Tensor) -> str:
    """128 bits over a tensor's bytes, dtype and shape. Sender and receiver take it on the same kind of device."""
    if tensor.device.type != "cpu":
        return device_fingerprint(tensor)
    return seal(xxhash.xxh3_128(tensor_bytes(tensor).data), dtype_name(tensor.dtype), tensor.shape)


def device_fingerprint(tensor: torch.Tensor) -> str:
    """As `fingerprint`, in torch operations only, for tensors that should not leave a GPU.

    Two sums modulo 2**64 over 8-byte words w_i: w_i * (2i + 1) and w_i * (2i**2 + 1). Weights are odd, hence a change
    of one word always changes both sums; they depend on i, hence so does a swap of two words. It detects accidents, not
    an adversary.
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
    return seal(xxhash.xxh3_128(sums), dtype_name(tensor.dtype), tensor.shape)


def scale_fingerprint(scale: float) -> str:
    """The bits of a KV scale as a float32."""
    return np.float32(scale).tobytes().hex()


def quantised_fingerprints(layer: str, codes_NK: torch.Tensor, scale: torch.Tensor) -> dict[str, str]:
    """Fingerprints of one quantised layer, under names that no tensor of a checkpoint has."""
    return {f"{layer}.weight.fp8": fingerprint(codes_NK), f"{layer}.weight.scale": fingerprint(scale)}


def reference_fingerprints(layer: str, shards: Sequence[torch.Tensor]) -> list[dict[str, str]]:
    """Fingerprints of what each worker of an FP8 engine must make of its part of a layer, by the reference
    quantiser."""
    quantised = map(quantise_blocks, shards)
    return [quantised_fingerprints(layer, shard.codes_NK, shard.scale) for shard in quantised]


def by_worker(references: Iterable[Sequence[Mapping[str, str]]]) -> tuple[dict[str, str], ...]:
    """Fingerprints of all layers for each worker, from those of each layer."""
    return tuple(
        {name: value for layer in layers for name, value in layer.items()} for layers in zip(*references, strict=True)
    )


def mismatched(sent: Mapping[str, str], held: Mapping[str, str]) -> tuple[str, ...]:
    """Names of tensors that are not held, held with another fingerprint than the sender's, or held without having been
    sent."""
    return tuple(sorted(name for name in sent.keys() | held.keys() if sent.get(name) != held.get(name)))


def seal(digest: xxhash.xxh3_128, dtype: str, shape: Sequence[int]) -> str:
    """Add dtype and shape to a hash of the bytes. They come last: in front they would shift every block off its
    alignment."""
    digest.update(f"{dtype}{list(shape)}".encode())
    return digest.hexdigest()


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def tensor_bytes(tensor: torch.Tensor) -> Bytes:
    """The bytes of a tensor in its logical order; a view where its memory already lies so."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
