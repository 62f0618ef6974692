"""Calibrate the scales of an FP8 KV cache from the magnitudes of queries, keys and values.

The policy runs on a share of the batch with transformers' attention function wrapped. Its arguments are the values
that engines cache, after norm and rotary embedding, for every architecture. Only sums and token maxima are kept.

Dimension suffixes: B rollouts, H heads, S padded tokens, D size of a head, L layers.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch and transformers are partially typed.

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from paceline.fp8 import E4M3_MAX, E4M3_SMALLEST_NORMAL, KvScales, kv_scale
from paceline.learner.batch import draw

_PARTS = ("q", "k", "v")
_LISTENING = "paceline_listening"
SHARE = 0.05
"""Share of the batch's tokens, in whole samples, that a calibration reads, within the following limits."""
_FEWEST_TOKENS = 256
_MOST_TOKENS = 4096
_MARGIN = 1.25
"""Factor above the largest value read, as room for tokens that were not read. E4M3 is a floating-point format, so a
larger scale costs no precision until small values underflow."""


class Calibration:
    """Magnitudes observed on one rank. `in_use` are the engines' current scales, for the share of saturated values."""

    def __init__(self, num_layers: int, in_use: KvScales | None) -> None:
        self._in_use = in_use
        self._amax: list[list[list[torch.Tensor]]] = [[[] for _ in range(num_layers)] for _ in _PARTS]
        self.saturated_L = torch.zeros(num_layers, dtype=torch.float64)
        self.count_L = torch.zeros(num_layers, dtype=torch.float64)
        self.underflow_L = torch.zeros(num_layers, dtype=torch.float64)
        """Count of keys and values below the smallest normal FP8 number at a scale that fits the largest."""

    @contextmanager
    def listen(self, policy: PreTrainedModel, valid_BS: torch.Tensor) -> Generator[None]:
        """Observe a forward pass, without its padding."""

        def attend(
            module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
        ) -> Any:
            layer = module.layer_idx
            assert isinstance(layer, int)
            self._observe(layer, [part_BHSD.transpose(1, 2)[valid_BS] for part_BHSD in (query, key, value)])
            return sdpa_attention_forward(module, query, key, value, *args, **kwargs)  # as transformers calls it

        AttentionInterface.register(_LISTENING, attend)
        AttentionMaskInterface.register(_LISTENING, sdpa_mask)
        before = policy.config._attn_implementation  # pyright: ignore[reportPrivateUsage]  has no public getter
        assert before is not None, "load_policy sets it"
        policy.set_attn_implementation(_LISTENING)
        try:
            yield
        finally:
            policy.set_attn_implementation(before)

    def _observe(self, layer: int, parts: list[torch.Tensor]) -> None:
        """Observe queries, keys and values of one layer, [tokens, heads, size] each."""
        for number, part in enumerate(parts):
            self._amax[number][layer].append(part.abs().amax(dim=(1, 2)).float().cpu())
        for part, name in ((parts[1], "k"), (parts[2], "v")):
            if not part.numel():
                continue
            size = part.abs()
            self.count_L[layer] += size.numel()
            fitting = kv_scale(float(size.max()), _MARGIN)
            self.underflow_L[layer] += float((size < E4M3_SMALLEST_NORMAL * fitting).sum())
            if self._in_use is not None:
                self.saturated_L[layer] += float((size > E4M3_MAX * getattr(self._in_use, name)[layer]).sum())

    def amax(self) -> torch.Tensor:
        """Return the largest magnitudes as [3, layers]; zero without tokens on this rank."""
        nothing = torch.zeros(1)
        return torch.tensor([[float(torch.cat([nothing, *seen]).max()) for seen in layers] for layers in self._amax])


def scales_of(amax_3L: torch.Tensor, version: int) -> KvScales:
    rows: list[list[float]] = amax_3L.tolist()
    q, k, v = (tuple(kv_scale(amax, _MARGIN) for amax in row) for row in rows)
    return KvScales(version=version, q=q, k=k, v=v)


def calibration_metrics(scales: KvScales, sums_3L: torch.Tensor, *, known: bool) -> dict[str, float]:
    """Return metrics from the counts of saturated, underflowed and all values; `known` if there were earlier scales."""
    saturated_L, underflow_L, count_L = sums_3L.cpu()
    metrics = {"precision/underflow_share": float(underflow_L.sum() / count_L.sum().clamp(1))}
    if known:
        metrics["precision/saturated_share"] = float(saturated_L.sum() / count_L.sum().clamp(1))
    for layer, (k, v) in enumerate(zip(scales.k, scales.v, strict=True)):
        metrics |= {f"kv/scale_k/{layer}": k, f"kv/scale_v/{layer}": v}
        if known:
            metrics[f"kv/saturation/{layer}"] = float(saturated_L[layer] / count_L[layer].clamp(1))
    return metrics


def choose(lengths: Sequence[int], share: float, rng: np.random.Generator) -> list[int]:
    """Draw random samples with this share of all tokens, within limits unless it is 1."""
    budget = max(share * sum(lengths), _FEWEST_TOKENS)
    budget = budget if share == 1 else min(budget, _MOST_TOKENS)
    return draw(lengths, budget, rng, fewest=1)


def has_qk_norm(layer: nn.Module) -> bool:
    """Return whether the layer normalizes keys before they are cached, which bounds them."""
    return any(name.endswith(("k_norm", "k_layernorm", "qk_norm")) for name, _ in layer.named_modules())
