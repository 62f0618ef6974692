"""FP8 as a readable reference: what an engine must hold after a push, and which KV scales a policy needs.

Weights. vLLM's `fp8_per_block` quantises as it loads. For each block of 128 x 128 weights w, in float32,

    scale = max(largest |w|, 1e-4) / 448          code = E4M3(w * (1 / scale))

where E4M3 rounds to the nearest of 256 codes (4 bits of exponent, 3 of mantissa, largest value 448), ties to even. That
it multiplies by a reciprocal is part of the definition: a division would round some weights to the neighbouring code.
`quantise_blocks` gives the same bits, so that fingerprints of both can be compared. A layer is quantised as a worker of
the engine holds it: engines stack projections that read the same input, and a block may then reach from one into the
next; tensor-parallel workers split a layer first, and the blocks of each begin where its own part begins (`Sharding`).
Embeddings, norms, biases, the output head and the routers of mixtures of experts are left alone.

KV cache. Keys and values are stored as E4M3(x / scale) with one scale for the keys of a layer and one for its values.
Below 448 * scale the error is relative (3 bits), so a scale matters for the largest and smallest values: what is
above saturates, what is far below underflows.

    scale = margin * (percentile over tokens of the largest |x| of a token) / 448

Scales belong to a version of the policy: they say how large its keys are. Reloading weights sets vLLM's back to 1.

Dimension suffixes: N rows and K columns of a weight, T tokens, G groups of 128 columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import pad

BLOCK = 128
E4M3_MAX = 448.0
E4M3_SMALLEST_NORMAL = 2.0**-6
"""Below it the error is no longer relative: values lose their bits one by one."""
_SMALLEST_AMAX = 1e-4
"""Smallest maximum that a block is scaled by: a block of zeros must not divide by zero."""
STACKED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Projections of a checkpoint that engines hold as one layer, by that layer's name."""
SPLIT_BY_INPUT = ("o_proj", "down_proj")
"""Projections of which a tensor-parallel worker holds some columns; of the stacked ones it holds some rows."""
ROUTERS = ("gate", "shared_expert_gate", "router")
"""Names of layers that choose experts. A router in FP8 sends tokens to other experts than the learner's does."""


@dataclass(frozen=True, slots=True, eq=False)
class Quantised:
    """One matrix in FP8."""

    codes_NK: torch.Tensor
    scale: torch.Tensor
    """float32; one for each block."""


def quantise_blocks(weight_NK: torch.Tensor) -> Quantised:
    """The bits that `fp8_per_block` makes of a matrix. Row of blocks by row of blocks, so that each stays in the core's
    cache."""
    num_rows, num_columns = weight_NK.shape
    padded = pad(weight_NK, (0, -num_columns % BLOCK, 0, -num_rows % BLOCK))
    tiles = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # [rows of blocks, 128, columns of blocks, 128]
    codes = torch.empty(tiles.shape, dtype=torch.float8_e4m3fn, device=weight_NK.device)
    scale = torch.empty(tiles.shape[0], tiles.shape[2], device=weight_NK.device)
    for row, tile in enumerate(tiles):
        amax = tile.abs().amax(dim=(0, 2)).float().clamp(_SMALLEST_AMAX)
        scale[row] = amax / E4M3_MAX
        codes[row] = (tile * (1.0 / scale[row])[:, None]).to(torch.float8_e4m3fn)
    return Quantised(codes.view(padded.shape)[:num_rows, :num_columns].contiguous(), scale)


def dequantise_blocks(quantised: Quantised) -> torch.Tensor:
    """What the engine computes with, in float32."""
    num_rows, num_columns = quantised.codes_NK.shape
    scale_NK = quantised.scale.repeat_interleave(BLOCK, 0)[:num_rows].repeat_interleave(BLOCK, 1)[:, :num_columns]
    return quantised.codes_NK.float() * scale_NK


def quantise_activations(x_TK: torch.Tensor) -> Quantised:
    """Groups of 1 x 128, as kernels make them that multiply FP8 by FP8; vLLM's kernel on the CPU leaves activations
    alone."""
    groups_TGK = x_TK.float().unflatten(1, (-1, BLOCK))
    scale_TG = groups_TGK.abs().amax(-1).clamp(1e-10) / E4M3_MAX
    return Quantised(_to_e4m3(groups_TGK / scale_TG[..., None]).flatten(1), scale_TG)


@dataclass(frozen=True, slots=True)
class Sharding:
    """How the tensor-parallel workers of an engine split a policy's projections.

    Queries are split by heads, and so are keys and values; where there are fewer of these heads than workers, several
    workers hold the same one:

        q_proj             rows of some query heads          gate_proj, up_proj   some rows
        k_proj, v_proj     rows of some key-value heads      o_proj, down_proj    some columns
    """

    num_workers: int = 1
    num_kv_heads: int = 1
    """Key-value heads of the policy; of no matter with one worker."""

    def part(self, projection: str, weight_NK: torch.Tensor, rank: int) -> torch.Tensor:
        """What the worker of this rank holds of a projection, named as in a checkpoint (`o_proj`)."""
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
            f"{', '.join((*sum(STACKED.values(), ()), *SPLIT_BY_INPUT))}, because it is not known here how workers "
            "split others; set rollout.engine.tensor_parallel_size=1 or rollout.engine.weights=full"
        )


WHOLE = Sharding()
"""Sharding of an engine with one worker."""


class LayerStacker:
    """Takes the tensors of a checkpoint one by one; gives out the matrices that each worker of an engine quantises,
    stacked as it stacks them."""

    def __init__(self, sharding: Sharding) -> None:
        self._sharding = sharding
        self._waiting: dict[str, dict[str, torch.Tensor]] = {}

    def add(self, name: str, tensor: torch.Tensor) -> tuple[str, list[torch.Tensor]] | None:
        """The layer that this tensor completes, under the engine's name, with the weight of each worker in the
        precision that is quantised."""
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
    """Scales of every layer's queries, keys and values, in the order of the layers; they fit one version of the
    policy."""

    version: int
    q: tuple[float, ...]
    k: tuple[float, ...]
    v: tuple[float, ...]

    def __post_init__(self) -> None:
        assert len(self.q) == len(self.k) == len(self.v), "every layer has all three"

    def named(self) -> dict[str, float]:
        """`kv_scales.layers.3.k` and so on: names by which a receipt tells of them."""
        return {f"kv_scales.layers.{i}.{part}": x for part in "qkv" for i, x in enumerate(getattr(self, part))}


def kv_scale(amax: float, margin: float) -> float:
    """A float32, because engines hold it as one. A layer of zeros gets a scale that divides nothing by zero."""
    return float(np.float32(max(amax, _SMALLEST_AMAX) * margin / E4M3_MAX))


def percentile(amax_T: torch.Tensor, percent: float) -> float:
    """The smallest value that so many percent of the tokens do not exceed; 100 is the largest."""
    index = max(0, int(np.ceil(percent / 100 * len(amax_T))) - 1)
    return float(amax_T.float().kthvalue(index + 1).values)


def round_trip(x: torch.Tensor, scale: float) -> torch.Tensor:
    """What comes out of the KV cache for what went in."""
    return _to_e4m3(x.float() / scale).float() * scale


def _to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """To the nearest code, saturating as cache kernels do; torch's own conversion makes NaN of what is too large."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
