"""The run, its policy, its evaluation and its cluster."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from paceline.config.base import Adjustable, Section


class RunConfig(Section):
    name: Adjustable[str] = Field(default="run", max_length=100)
    """Name of the run's directory: letters, digits, `.`, `_` and `-`, starting with a letter or digit."""
    directory: Adjustable[Path] = Path("runs")
    """Parent of run directories. If the name exists, a number is appended to it."""
    steps: Adjustable[int] = Field(default=200, ge=1)
    """RL steps; each updates the policy once."""
    seed: int = 0
    """Seed of data order, sampling and learner."""
    max_age: int = Field(default=0, ge=0)
    """Largest number of policy versions between sampling a token and training on it. 0 trains synchronously. Above 0,
    engines continue to sample while the learner works, with up to `max_age + 1` batches in flight, and a sync pauses
    them in the middle of rollouts."""
    too_old: Literal["wait", "abort"] = "wait"
    """Response to a group that would exceed `max_age`. `wait` makes the learner wait for it. `abort` samples it again
    from the current policy; long responses are aborted more often, which biases training toward short ones."""
    save_every: Adjustable[int] = Field(default=0, ge=0)
    """Steps between saved policies; 0 saves the last one only."""
    checkpoint_every: Adjustable[int] = Field(default=10, ge=0)
    """Steps between checkpoints for `paceline train --resume`. The last two are kept, each about three times the size
    of the policy in float32. 0 disables resume."""
    keep_rollouts: Adjustable[bool] = False
    """Keep all rollouts, for `paceline replay` and `paceline report --against`: about 8 bytes a token. By default,
    checkpoints remove the rollouts before them."""
    sinks: Adjustable[tuple[Literal["console", "wandb", "tensorboard", "mlflow", "prometheus"], ...]] = ("console",)
    """Destinations of metrics besides metrics.jsonl. All but `console` need an extra, as in `pip install
    'paceline[tensorboard]'`."""
    prometheus_port: Adjustable[int] = Field(default=9400, ge=1024, le=65535)
    """Port of the `prometheus` sink on the loopback interface."""

    @field_validator("name")
    @classmethod
    def _plain(cls, name: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise ValueError(
                f"run.name: got {name!r}; must be letters, digits, '.', '_' and '-' after a letter or digit because it "
                "names a directory inside run.directory"
            )
        return name


class PolicyConfig(Section):
    model: str
    """A Hugging Face checkpoint directory or model name, such as `Qwen/Qwen3-8B`; or a policy of the built-in arena:
    `arena:tiny`, `arena:small` or `arena:large`."""


class EvalConfig(Section):
    every: int = Field(default=10, ge=0)
    """Steps between evaluations, which also run at the start and at the end; 0 disables them."""
    num_prompts: int = Field(default=256, ge=1)
    """Held-out prompts."""
    samples_per_prompt: int = Field(default=1, ge=1)
    """Rollouts per held-out prompt."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature of evaluation rollouts."""


class ClusterConfig(Section):
    address: Adjustable[str | None] = None
    """Address of a running Ray cluster (`auto` or host:port). None starts a cluster on this machine for the run."""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """Device of engines and learner. `auto` uses GPUs if any node has one. `gpu` fails without GPUs. `cpu` ignores them
    and requires vLLM's CPU build."""
