"""The size of a Qwen3 policy, which its config, its training and its growth agree on."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import Qwen3Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    hidden_size: int
    num_layers: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int = 64
    """One of the sizes that vLLM's attention on the CPU has a kernel for: 32, 64, 80, 96, 112, 128 and some larger
    ones."""

    @property
    def group_size(self) -> int:
        """Query heads for each key-value head."""
        return self.num_heads // self.num_kv_heads


def shape_of(config: Qwen3Config) -> Shape:
    assert config.num_key_value_heads is not None and config.head_dim is not None, "Qwen3 checkpoints always name both"
    return Shape(
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
    )
