"""GPU specifications and model sizes, with sources.

Peaks are dense (without structured sparsity) and per GPU. A model is described by its Hugging Face config.json, which
gives the bytes and operations of a forward pass. A mixture of experts reads only the experts that the step's tokens are
routed to: with a balanced router, E experts and e per token, n tokens cover a share 1 - (1 - e/E)^n.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

Precision = Literal["bf16", "fp8"]
BYTES: Mapping[str, float] = {"bf16": 2.0, "fp8": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    name: str
    bf16_tflops: float
    fp8_tflops: float
    """Equal to bf16_tflops on hardware without FP8: weights may still be stored in FP8."""
    memory_tb_s: float
    memory_gb: float
    link_gb_s: float
    """Bandwidth to other GPUs of the node or rack, in one direction."""

    def flops(self, precision: Precision) -> float:
        return 1e12 * (self.fp8_tflops if precision == "fp8" else self.bf16_tflops)


_KNOWN = tomllib.loads((Path(__file__).parent / "hardware.toml").read_text(encoding="utf-8"))
GPUS: Mapping[str, Gpu] = {name: Gpu(name=name, **facts) for name, facts in _KNOWN["gpus"].items()}


def find_gpu(name: str) -> Gpu:
    wanted = re.sub(r"[^A-Z0-9]", "", name.upper().replace("NVIDIA", "").replace("GEFORCE", ""))
    if wanted not in GPUS:
        near = get_close_matches(wanted, GPUS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"gpus: got {name!r}; must be one of {', '.join(GPUS)}{hint}")
    return GPUS[wanted]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder. Zero experts is a dense model; `kv_rank` above zero is multi-head latent attention (MLA)."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    dense_layers: int = 0
    """Dense layers at the start of a mixture of experts."""
    kv_rank: int = 0
    rope_dim: int = 0
    cached_layers: int | None = None
    """Layers with a KV cache that grows with the context; the others have a fixed state or window. None means all."""
    expert_bytes: float | None = None
    """Bytes of one expert weight in a quantized checkpoint. None follows the precision of the run."""

    @property
    def attention_params(self) -> float:
        """Return the parameters of one attention layer."""
        if self.kv_rank:
            queries = self.hidden * self.heads * (self.head_dim + self.rope_dim)
            down, up = self.hidden * (self.kv_rank + self.rope_dim), self.kv_rank * self.heads * 2 * self.head_dim
            return queries + down + up + self.heads * self.head_dim * self.hidden
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def expert_params(self) -> float:
        return 3.0 * self.hidden * self.expert_intermediate

    @property
    def moe_layers(self) -> int:
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def fixed_params(self) -> float:
        """Parameters read in every step: attention, dense and shared feed-forward layers, output head."""
        dense = (self.layers - self.moe_layers) * 3.0 * self.hidden * self.intermediate
        shared = self.moe_layers * (3.0 * self.hidden * self.shared_intermediate + self.hidden * self.experts)
        return self.layers * self.attention_params + dense + shared + self.hidden * self.vocab

    @property
    def active_params(self) -> float:
        """Parameters multiplied with one token."""
        return self.fixed_params + self.moe_layers * self.experts_per_token * self.expert_params

    @property
    def total_params(self) -> float:
        embedding = 0.0 if self.tied else self.hidden * self.vocab
        return self.fixed_params + self.moe_layers * self.experts * self.expert_params + embedding

    def expert_coverage(self, num_tokens: float) -> float:
        """Return the share of a layer's experts that a step reads."""
        return 1 - (1 - self.experts_per_token / self.experts) ** num_tokens if self.experts else 0.0

    def weight_bytes(self, precision: Precision) -> float:
        """Return bytes in memory. Embeddings and the output head stay in BF16."""
        embeddings = self.hidden * self.vocab * (1 if self.tied else 2)
        experts = self.moe_layers * self.experts * self.expert_params
        inner = self.total_params - embeddings - experts
        return 2.0 * embeddings + BYTES[precision] * inner + self._expert_bytes(precision) * experts

    def read_bytes(self, num_tokens: float, precision: Precision) -> float:
        """Return the bytes of weights that a step reads."""
        head = self.hidden * self.vocab
        experts = self.moe_layers * self.experts * self.expert_params * self.expert_coverage(num_tokens)
        return 2.0 * head + BYTES[precision] * (self.fixed_params - head) + self._expert_bytes(precision) * experts

    @property
    def kv_layers(self) -> int:
        return self.layers if self.cached_layers is None else self.cached_layers

    def kv_bytes_per_token(self, precision: Precision) -> float:
        width = self.kv_rank + self.rope_dim if self.kv_rank else 2 * self.kv_heads * self.head_dim
        return self.kv_layers * width * BYTES[precision]

    def _expert_bytes(self, precision: Precision) -> float:
        return BYTES[precision] if self.expert_bytes is None else self.expert_bytes


SHAPES: Mapping[str, ModelShape] = {name: ModelShape(name=name, **sizes) for name, sizes in _KNOWN["models"].items()}


def find_shape(model: str) -> ModelShape:
    """Read a config.json (or a directory with one), or look up a known model by name."""
    path = Path(model)
    file = path / "config.json" if path.is_dir() else path
    if file.is_file():
        try:
            return shape_of(json.loads(file.read_text(encoding="utf-8")), name=model)
        except json.JSONDecodeError as error:
            raise ValueError(f"model: {file} is not JSON: {error}") from None
    name = model.rpartition("/")[2].removesuffix("-Base").removesuffix("-Instruct")
    for known, shape in SHAPES.items():
        if known.lower() == name.lower():
            return replace(shape, name=model)
    near = get_close_matches(name, SHAPES, n=1)
    raise ValueError(
        f"model: got {model!r}; must be a Hugging Face config.json, a directory with one, or one of {', '.join(SHAPES)}"
        + (f"; did you mean {near[0]}?" if near else "")
        + " (for any other model, download its config.json and give the path)"
    )


def shape_of(config: Mapping[str, Any], *, name: str) -> ModelShape:
    """Read a Hugging Face config of the Llama, Qwen, Mixtral or DeepSeek families, or the text_config inside."""
    config = {**config, **config.get("text_config", {})}

    def number(*keys: str, default: float | None = None) -> float:
        for key in keys:
            if config.get(key) is not None:
                return config[key]
        if default is None:
            raise ValueError(f"model: {name} has none of {', '.join(keys)} in its config.json; must describe a decoder")
        return default

    hidden, heads = int(number("hidden_size", "n_embd")), int(number("num_attention_heads", "n_head"))
    layers = int(number("num_hidden_layers", "n_layer"))
    experts = int(number("num_experts", "n_routed_experts", "num_local_experts", default=0))
    kv_rank = int(number("kv_lora_rank", default=0))
    expert_intermediate = (
        int(number("moe_intermediate_size", "intermediate_size", default=4 * hidden)) if experts else 0
    )
    num_shared = int(number("n_shared_experts", default=0))
    kinds = config.get("layer_types") or ()
    return ModelShape(
        name=name,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=int(number("num_key_value_heads", default=heads)),
        head_dim=int(number("v_head_dim" if kv_rank else "head_dim", default=hidden // heads)),
        intermediate=int(number("intermediate_size", default=4 * hidden)),
        vocab=int(number("vocab_size")),
        tied=bool(config.get("tie_word_embeddings", False)),
        experts=experts,
        experts_per_token=int(number("num_experts_per_tok", "experts_per_token", default=2)) if experts else 0,
        expert_intermediate=expert_intermediate,
        shared_intermediate=int(number("shared_expert_intermediate_size", default=num_shared * expert_intermediate)),
        dense_layers=int(number("first_k_dense_replace", default=0)),
        kv_rank=kv_rank,
        rope_dim=int(number("qk_rope_head_dim", default=0)),
        cached_layers=sum(kind == "full_attention" for kind in kinds) or None,
    )
