"""`fp8.Sharding` against vLLM's own layers: which part of a projection each tensor-parallel worker loads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.fp8 import LayerStacker, Sharding

SELF_ATTN, MLP = "model.layers.0.self_attn", "model.layers.0.mlp"
HIDDEN, HEAD, NUM_HEADS, INNER = 8, 4, 8, 16


def layers_of_vllm(num_kv_heads: int) -> dict[str, Any]:
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear

    bf16: dict[str, Any] = {"bias": False, "params_dtype": torch.bfloat16}
    return {
        f"{SELF_ATTN}.qkv_proj": QKVParallelLinear(HIDDEN, HEAD, NUM_HEADS, num_kv_heads, **bf16),
        f"{SELF_ATTN}.o_proj": RowParallelLinear(NUM_HEADS * HEAD, HIDDEN, **bf16),
        f"{MLP}.gate_up_proj": MergedColumnParallelLinear(HIDDEN, [INNER, INNER], **bf16),
        f"{MLP}.down_proj": RowParallelLinear(INNER, HIDDEN, **bf16),
    }


def checkpoint(num_kv_heads: int) -> dict[str, torch.Tensor]:
    return {
        f"{SELF_ATTN}.q_proj": torch.randn(NUM_HEADS * HEAD, HIDDEN),
        f"{SELF_ATTN}.k_proj": torch.randn(num_kv_heads * HEAD, HIDDEN),
        f"{SELF_ATTN}.v_proj": torch.randn(num_kv_heads * HEAD, HIDDEN),
        f"{SELF_ATTN}.o_proj": torch.randn(HIDDEN, NUM_HEADS * HEAD),
        f"{MLP}.gate_proj": torch.randn(INNER, HIDDEN),
        f"{MLP}.up_proj": torch.randn(INNER, HIDDEN),
        f"{MLP}.down_proj": torch.randn(HIDDEN, INNER),
    }


STACKED = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
"""Layer and shard id for vLLM's loaders, by projection."""


@pytest.mark.parametrize(("num_workers", "num_kv_heads"), [(2, 4), (2, 2), (2, 1), (4, 2)])
def test_reference_is_sharded_as_vllm_shards_its_layers(
    num_workers: int, num_kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a sound FP8 engine would be called lost at its first push, or a broken one sound."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor import parameter
    from vllm.model_executor.layers import linear

    weights = checkpoint(num_kv_heads)
    stacker = LayerStacker(Sharding(num_workers, num_kv_heads))
    ours = dict(filter(None, (stacker.add(f"{name}.weight", weight) for name, weight in weights.items())))
    for rank in range(num_workers):
        for module in (linear, parameter):
            monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: num_workers)
            monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
        with set_current_vllm_config(VllmConfig()):
            theirs = layers_of_vllm(num_kv_heads)
        for name, weight in weights.items():
            parent, _, leaf = name.rpartition(".")
            layer, *shard = STACKED.get(leaf, (leaf,))
            held = theirs[f"{parent}.{layer}"].weight
            held.weight_loader(held, weight.bfloat16(), *shard)
        assert ours.keys() == theirs.keys()
        for name, layer in theirs.items():
            assert torch.equal(layer.weight, ours[name][rank]), f"{name} of worker {rank}"
