"""Set the scales of an FP8 KV cache: vLLM reads them from checkpoints only, and a reload resets them to 1.

Relied upon:
  vllm/model_executor/layers/attention/attention.py   `_{q,k,v}_scale`, `_{q,k,v}_scale_float`, `_{k,v}_scale_cpu`
  vllm/model_executor/models/utils.py                 extract_layer_index
  vllm/utils/torch_utils.py                           is_quantized_kv_cache

Goes when vLLM's worker has a method `set_kv_scales`.
"""

from __future__ import annotations

from typing import Any

import torch

from paceline.fp8 import KvScales


def scaled_attention(model: torch.nn.Module) -> list[tuple[int, Any]]:
    """Return attention layers with an FP8 KV cache, with their index in the model."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.models.utils import extract_layer_index
    from vllm.utils.torch_utils import is_quantized_kv_cache

    layers = (module for module in model.modules() if isinstance(module, Attention))
    return [
        (extract_layer_index(layer.layer_name), layer)
        for layer in layers
        if is_quantized_kv_cache(layer.kv_cache_dtype)
    ]


def set_kv_scales(model: torch.nn.Module, scales: KvScales) -> None:
    """Set the scales in all places that attention kernels read: a tensor and a number beside it.

    The KV cache must be recomputed: it was written with the old scales (`VllmEngine.on_new_weights`).
    """
    for layer, attention in scaled_attention(model):
        for part, scale in (("q", scales.q[layer]), ("k", scales.k[layer]), ("v", scales.v[layer])):
            getattr(attention, f"_{part}_scale").fill_(scale)
            setattr(attention, f"_{part}_scale_float", scale)
        attention._k_scale_cpu.fill_(scales.k[layer])
        attention._v_scale_cpu.fill_(scales.v[layer])


def held_kv_scales(model: torch.nn.Module) -> dict[str, tuple[float, float]]:
    """Return each scale by its name in `KvScales.named`, as tensor and as number."""
    return {
        f"kv_scales.layers.{layer}.{part}": (
            float(getattr(attention, f"_{part}_scale")),
            getattr(attention, f"_{part}_scale_float"),
        )
        for layer, attention in scaled_attention(model)
        for part in "qkv"
    }
