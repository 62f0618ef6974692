"""Function-preserving growth: a checkpoint of any size with the logits of a small one.

A grown policy has the outputs of its source and the step times of a large model, so speed can be measured with a policy
that was trained in minutes. Growth is exact (Net2Net, https://arxiv.org/abs/1511.05641):

- wider residual stream: the new dimensions are zero in the embedding and in every row that writes to them. RMSNorm then
  divides by sqrt(H/H') of its former divisor; norm weights times sqrt(H/H') and epsilon times H/H' compensate. (The
  norms of queries and keys share that epsilon, a difference of its order.)
- more heads and neurons: the columns that read them (o_proj, down_proj) are zero.
- more layers between the original ones: their output projections are zero.

Unused new weights are random, because all-zero blocks are a degenerate case for quantization and cannot learn.
"""

from __future__ import annotations

import copy
import json
import math
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config

GROWTH_FILE = "growth.json"
_INITIAL_DEVIATION = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    hidden_size: int
    num_layers: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int = 64
    """A size with a CPU attention kernel in vLLM: 32, 64, 80, 96, 112, 128 and some larger ones."""

    @property
    def group_size(self) -> int:
        """Query heads per key-value head."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """Positions of the source's parts in the target."""

    source: Shape
    target: Shape

    @property
    def layers(self) -> list[int]:
        """Positions of the original layers, evenly spread over the target."""
        num_source, num_target = self.source.num_layers, self.target.num_layers
        return [(2 * layer + 1) * num_target // (2 * num_source) for layer in range(num_source)]

    @property
    def query_rows(self) -> torch.Tensor:
        """Rows of the query heads, each in the group of its key-value head."""
        group = self.source.group_size
        heads = [head // group * self.target.group_size + head % group for head in range(self.source.num_heads)]
        return (torch.tensor(heads)[:, None] * self.target.head_dim + torch.arange(self.target.head_dim)).flatten()

    @property
    def kv_rows(self) -> torch.Tensor:
        return torch.arange(self.source.num_kv_heads * self.source.head_dim)

    @property
    def hidden(self) -> torch.Tensor:
        return torch.arange(self.source.hidden_size)

    @property
    def neurons(self) -> torch.Tensor:
        return torch.arange(self.source.intermediate_size)

    @property
    def norm_factor(self) -> float:
        return math.sqrt(self.source.hidden_size / self.target.hidden_size)


def grow(source_dir: Path, target_dir: Path, target: Shape, *, dtype: torch.dtype = torch.float32) -> None:
    """Write a grown copy of a Qwen3 checkpoint, and the positions of the original layers in `growth.json`."""
    config = Qwen3Config.from_pretrained(source_dir)
    source = shape_of(config)
    _check(source, target)
    plan = _Plan(source=source, target=target)
    weights = _grow_weights(load_file(source_dir / "model.safetensors"), plan)
    target_dir.mkdir(parents=True, exist_ok=True)
    stored = {name: weight.to(dtype).contiguous() for name, weight in weights.items()}
    save_file(stored, target_dir / "model.safetensors", metadata={"format": "pt"})
    _grow_config(config, plan, dtype).save_pretrained(target_dir)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(source_dir / name, target_dir / name)
    (target_dir / GROWTH_FILE).write_text(json.dumps({"original_layers": plan.layers}) + "\n", encoding="utf-8")


def _check(source: Shape, target: Shape) -> None:
    least = asdict(source)
    for name, size in asdict(target).items():
        if size < least[name]:
            raise ValueError(
                f"{name}: got {size}; must be at least {least[name]} because growth only adds to the source"
            )
    if target.num_heads % target.num_kv_heads or target.group_size < source.group_size:
        raise ValueError(
            f"num_heads: got {target.num_heads}; must be {target.num_kv_heads} (num_kv_heads) times a whole number of "
            f"at least {source.group_size} because each query head keeps its key-value head"
        )


def _grow_config(source: Qwen3Config, plan: _Plan, dtype: torch.dtype) -> Qwen3Config:
    config = copy.deepcopy(source)
    config.hidden_size = plan.target.hidden_size
    config.num_hidden_layers = plan.target.num_layers
    config.layer_types = ["full_attention"] * plan.target.num_layers
    config.max_window_layers = plan.target.num_layers
    config.intermediate_size = plan.target.intermediate_size
    config.num_attention_heads = plan.target.num_heads
    config.num_key_value_heads = plan.target.num_kv_heads
    config.rms_norm_eps = source.rms_norm_eps * plan.source.hidden_size / plan.target.hidden_size
    config.dtype = dtype
    return config


def _grow_weights(weights: dict[str, torch.Tensor], plan: _Plan) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden_size = plan.target.hidden_size
    grown = {
        "model.embed_tokens.weight": _place_columns(weights["model.embed_tokens.weight"], hidden_size),
        "lm_head.weight": _place_columns(weights["lm_head.weight"], hidden_size),
        "model.norm.weight": _grow_norm(weights["model.norm.weight"], plan),
    }
    origin = {position: layer for layer, position in enumerate(plan.layers)}
    for position in range(plan.target.num_layers):
        layer = _new_layer(plan.target, generator)
        if position in origin:
            prefix = f"model.layers.{origin[position]}."
            _place_layer(
                {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}, layer, plan
            )
        grown |= {f"model.layers.{position}.{name}": weight for name, weight in layer.items()}
    return grown


def _new_layer(shape: Shape, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return a layer that adds nothing to the residual stream."""

    def random(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * _INITIAL_DEVIATION

    hidden_size, head_dim = shape.hidden_size, shape.head_dim
    return {
        "input_layernorm.weight": torch.ones(hidden_size),
        "post_attention_layernorm.weight": torch.ones(hidden_size),
        "self_attn.q_norm.weight": torch.ones(head_dim),
        "self_attn.k_norm.weight": torch.ones(head_dim),
        "self_attn.q_proj.weight": random(shape.num_heads * head_dim, hidden_size),
        "self_attn.k_proj.weight": random(shape.num_kv_heads * head_dim, hidden_size),
        "self_attn.v_proj.weight": random(shape.num_kv_heads * head_dim, hidden_size),
        "self_attn.o_proj.weight": torch.zeros(hidden_size, shape.num_heads * head_dim),
        "mlp.gate_proj.weight": random(shape.intermediate_size, hidden_size),
        "mlp.up_proj.weight": random(shape.intermediate_size, hidden_size),
        "mlp.down_proj.weight": torch.zeros(hidden_size, shape.intermediate_size),
    }


def _place_layer(source: dict[str, torch.Tensor], layer: dict[str, torch.Tensor], plan: _Plan) -> None:
    """Copy an original layer into a new one."""
    rows_and_columns = {
        "self_attn.q_proj.weight": (plan.query_rows, plan.hidden),
        "self_attn.k_proj.weight": (plan.kv_rows, plan.hidden),
        "self_attn.v_proj.weight": (plan.kv_rows, plan.hidden),
        "self_attn.o_proj.weight": (plan.hidden, plan.query_rows),
        "mlp.gate_proj.weight": (plan.neurons, plan.hidden),
        "mlp.up_proj.weight": (plan.neurons, plan.hidden),
        "mlp.down_proj.weight": (plan.hidden, plan.neurons),
    }
    for name, (rows, columns) in rows_and_columns.items():
        layer[name][rows[:, None], columns] = source[name].float()
    for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
        layer[name] = _grow_norm(source[name], plan)
    for name in ("self_attn.q_norm.weight", "self_attn.k_norm.weight"):
        layer[name] = source[name].float()


def _grow_norm(weight: torch.Tensor, plan: _Plan) -> torch.Tensor:
    grown = torch.ones(plan.target.hidden_size)
    grown[: len(weight)] = weight.float()
    return grown * plan.norm_factor


def _place_columns(weight: torch.Tensor, num_columns: int) -> torch.Tensor:
    grown = torch.zeros(len(weight), num_columns)
    grown[:, : weight.shape[1]] = weight.float()
    return grown
