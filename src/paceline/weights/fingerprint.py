"""128-bit fingerprints of tensors over bytes, dtype and shape, compared between sender and receiver.

`HostCopy` restores tensors that changed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from paceline.fp8 import quantize_blocks
from paceline.types import PacelineError

Bytes = npt.NDArray[np.uint8]

# Copy, hash and check by blocks that fit the core's cache.
BLOCK_BYTES = 512 * 1024


def hash_threads() -> int:
    """Return the number of hash threads: two saturate memory on tested machines; an engine may have one core."""
    return min(2, len(os.sched_getaffinity(0)))


def fingerprint(tensor: torch.Tensor) -> str:
    """Return the fingerprint of a tensor. Sender and receiver must compute it on the same kind of device."""
    if tensor.device.type != "cpu":
        return device_fingerprint(tensor)
    return seal(xxhash.xxh3_128(tensor_bytes(tensor).data), dtype_name(tensor.dtype), tensor.shape)


def device_fingerprint(tensor: torch.Tensor) -> str:
    """Compute a fingerprint with torch operations, for tensors on a GPU.

    Two sums modulo 2**64 over 8-byte words w_i: w_i * (2i + 1) and w_i * (2i**2 + 1). The factors are odd, so a change
    of one word changes both sums; they depend on i, so a swap of two words does too. It detects accidents, not attacks.
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
    """Return the bits of a KV scale as a float32."""
    return np.float32(scale).tobytes().hex()


def quantized_fingerprints(layer: str, codes_NK: torch.Tensor, scale: torch.Tensor) -> dict[str, str]:
    """Return the fingerprints of one quantized layer, under names that no checkpoint uses."""
    return {f"{layer}.weight.fp8": fingerprint(codes_NK), f"{layer}.weight.scale": fingerprint(scale)}


def reference_fingerprints(layer: str, shards: Sequence[torch.Tensor]) -> list[dict[str, str]]:
    """Return the expected fingerprints of each FP8 worker's shard of a layer, from the reference quantizer."""
    quantized = map(quantize_blocks, shards)
    return [quantized_fingerprints(layer, shard.codes_NK, shard.scale) for shard in quantized]


def by_worker(references: Iterable[Sequence[Mapping[str, str]]]) -> tuple[dict[str, str], ...]:
    return tuple(
        {name: value for layer in layers for name, value in layer.items()} for layers in zip(*references, strict=True)
    )


def mismatched(sent: Mapping[str, str], held: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of tensors that only one side has or whose fingerprints differ."""
    return tuple(sorted(name for name in sent.keys() | held.keys() if sent.get(name) != held.get(name)))


def seal(digest: xxhash.xxh3_128, dtype: str, shape: Sequence[int]) -> str:
    """Add dtype and shape to a hash of the bytes. They come last so that blocks stay aligned."""
    digest.update(f"{dtype}{list(shape)}".encode())
    return digest.hexdigest()


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def tensor_bytes(tensor: torch.Tensor) -> Bytes:
    """Return the bytes of a tensor in logical order, as a view if its memory is contiguous."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


class HostCopy:
    """Copies of tensors by name, with their fingerprints on the device."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[str, torch.Tensor]] = {}

    def keep(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy tensors that changed since the last call. A failure leaves no copy: an old one would undo updates."""
        before, self._kept = self._kept, {}
        found = {name: fingerprint(tensor) for name, tensor in tensors.items()}
        self._kept = {
            name: before[name]
            if name in before and before[name][0] == found[name]
            else (found[name], tensor.detach().to("cpu", copy=True))
            for name, tensor in tensors.items()
        }

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """Restore tensors that differ from the copy, in place; return their names. Ignore copies of other tensors."""
        lost = [
            name for name, (kept, _) in self._kept.items() if name in tensors and fingerprint(tensors[name]) != kept
        ]
        with torch.inference_mode():  # models may have tensors that were created in it
            for name in lost:
                tensors[name].copy_(self._kept[name][1])
        if wrong := [name for name in lost if fingerprint(tensors[name]) != self._kept[name][0]]:
            raise PacelineError(f"{', '.join(wrong)}: restored from the host copy, but the fingerprint still differs")
        return lost
