"""Reference implementation of vLLM's FP8 weights and KV scales.

Weights. vLLM's `fp8_per_block` quantizes while it loads. For each block of 128 x 128 weights w, in float32,

    scale = max(largest |w|, 1e-4) / 448          code = E4M3(w * (1 / scale))

where E4M3 rounds to the nearest of 256 codes (4 bits of exponent, 3 of mantissa, largest value 448), ties to even. The
product with a reciprocal matters: a division would round some weights to the neighboring code. `quantize_blocks`
returns the same bits, so fingerprints of both can be compared. The layout is the worker's: engines stack projections
with the same input, so a block may span two of them; tensor-parallel workers split a layer first, and blocks start at
the beginning of each part (`Sharding`). Embeddings, norms, biases, the output head and routers keep their precision.

KV cache. Keys and values are stored as E4M3(x / scale), with one scale per layer for keys and one for values. Below
448 * scale the error is relative (3 bits). Larger values saturate, and values far below underflow.

    scale = margin * (largest |x|) / 448

Scales belong to a policy version. Reloading weights resets vLLM's scales to 1.

Dimension suffixes: N rows and K columns of a weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

BLOCK = 128
E4M3_MAX = 448.0
E4M3_SMALLEST_NORMAL = 2.0**-6
"""Below it the error is not relative any more: values lose bits one by one."""
_SMALLEST_AMAX = 1e-4
"""Lower bound of a block's maximum: avoids division by zero."""
STACKED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Projections that engines stack into one layer, by the layer's name."""
SPLIT_BY_INPUT = ("o_proj", "down_proj")
"""Projections that tensor parallelism splits by columns; it splits stacked ones by rows."""
ROUTERS = ("gate", "shared_expert_gate", "router")
"""Layers that choose experts. A router in FP8 sends tokens to other experts than the learner's."""


@dataclass(frozen=True, slots=True, eq=False)
class Quantized:
    codes_NK: torch.Tensor
    scale: torch.Tensor
    """float32, one per block."""


def quantize_blocks(weight_NK: torch.Tensor) -> Quantized:
    """Quantize a matrix to the bits of `fp8_per_block`, one row of blocks at a time to stay in the core's cache."""
    num_rows, num_columns = weight_NK.shape
    padded = pad(weight_NK, (0, -num_columns % BLOCK, 0, -num_rows % BLOCK))
    tiles = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # [rows of blocks, 128, columns of blocks, 128]
    codes = torch.empty(tiles.shape, dtype=torch.float8_e4m3fn, device=weight_NK.device)
    scale = torch.empty(tiles.shape[0], tiles.shape[2], device=weight_NK.device)
    for row, tile in enumerate(tiles):
        amax = tile.abs().amax(dim=(0, 2)).float().clamp(_SMALLEST_AMAX)
        scale[row] = amax / E4M3_MAX
        codes[row] = (tile * (1.0 / scale[row])[:, None]).to(torch.float8_e4m3fn)
    return Quantized(codes.view(padded.shape)[:num_rows, :num_columns].contiguous(), scale)


@dataclass(frozen=True, slots=True)
class Sharding:
    """Tensor-parallel split of a policy's projections.

    Queries, keys and values are split by heads. With fewer key-value heads than workers, several workers hold the same
    head:

        q_proj             rows of some query heads          gate_proj, up_proj   some rows
        k_proj, v_proj     rows of some key-value heads      o_proj, down_proj    some columns
    """

    num_workers: int = 1
    num_kv_heads: int = 1
    """Key-value heads of the policy; unused with one worker."""

    def part(self, projection: str, weight_NK: torch.Tensor, rank: int) -> torch.Tensor:
        """Return the part of a projection (`o_proj`) that the worker of this rank holds."""
        if self.num_workers == 1:
            return weight_NK
        if projection in SPLIT_BY_INPUT:
            return weight_NK.chunk(self.num_workers, 1)[rank]
        if projection in ("k_proj", "v_proj"):
            num_parts = min(self.num_workers, self.num_kv_heads)
            return weight_NK.chunk(num_parts)[rank * num_parts // self.num_workers]
        if any(projection in parts for parts in STACKED.values()):
            return weight_NK.chunk(self.num_workers)[rank]
        raise ValueError(
            f"{projection}: got a layer in FP8 with {self.num_workers} tensor-parallel workers; must be one of "
            f"{', '.join((*sum(STACKED.values(), ()), *SPLIT_BY_INPUT))}, because the split of other layers is "
            "unknown; set rollout.engine.tensor_parallel_size=1 or rollout.engine.weights=full"
        )


WHOLE = Sharding()
"""Sharding of an engine with one worker."""


class LayerStacker:
    """Collect a checkpoint's tensors into the matrices that each worker of an engine quantizes."""

    def __init__(self, sharding: Sharding) -> None:
        self._sharding = sharding
        self._waiting: dict[str, dict[str, torch.Tensor]] = {}

    def add(self, name: str, tensor: torch.Tensor) -> tuple[str, list[torch.Tensor]] | None:
        """Return the layer that this tensor completes: the engine's name for it and each worker's bfloat16 weight."""
        module, _, kind = name.rpartition(".")
        parent, _, leaf = module.rpartition(".")
        if kind != "weight" or tensor.dim() != 2 or ".layers." not in name or leaf in ROUTERS:
            return None
        tensor = tensor.to(torch.bfloat16)
        stacked = next((stack for stack, parts in STACKED.items() if leaf in parts), None)
        ranks = range(self._sharding.num_workers)
        if stacked is None:
            return module, [self._sharding.part(leaf, tensor, rank) for rank in ranks]
        held = self._waiting.setdefault(f"{parent}.{stacked}", {})
        held[leaf] = tensor
        if len(held) < len(STACKED[stacked]):
            return None
        del self._waiting[f"{parent}.{stacked}"]
        return f"{parent}.{stacked}", [
            torch.cat([self._sharding.part(part, held[part], rank) for part in STACKED[stacked]]) for rank in ranks
        ]


# KV cache


@dataclass(frozen=True, slots=True, kw_only=True)
class KvScales:
    """Scales of every layer's queries, keys and values, calibrated for one policy version."""

    version: int
    q: tuple[float, ...]
    k: tuple[float, ...]
    v: tuple[float, ...]

    def __post_init__(self) -> None:
        assert len(self.q) == len(self.k) == len(self.v), "every layer has all three"

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> KvScales:
        q, k, v = (tuple(plain[part]) for part in "qkv")
        return cls(version=plain["version"], q=q, k=k, v=v)

    def named(self) -> dict[str, float]:
        """Return the scales by the names that receipts use (`kv_scales.layers.3.k`)."""
        return {f"kv_scales.layers.{i}.{part}": x for part in "qkv" for i, x in enumerate(getattr(self, part))}


def kv_scale(amax: float, margin: float) -> float:
    """Return the scale, rounded to float32 as in engines. A layer of zeros gets a positive scale."""
    return float(np.float32(max(amax, _SMALLEST_AMAX) * margin / E4M3_MAX))
