"""The run and the policy that it trains."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from paceline.config.base import Section


class RunConfig(Section):
    name: str = Field(default="run", max_length=100)
    """Name of the run's directory: letters, digits, `.`, `_` and `-`, the first of them a letter or digit."""
    directory: Path = Path("runs")
    """Directory in which run directories are created. An existing run is never overwritten: a number is added to the
    name."""
    steps: int = Field(default=40, ge=1)
    """Number of RL steps, each one policy update."""
    seed: int = 0
    """Seed of the order of the data, the engines' sampling and the learner."""
    lag: int = Field(default=0, ge=0)
    """How many batches the engines may be ahead of the learner. 0 is synchronous: a batch is sampled by one policy
    version. With lag n, n + 1 batches are in flight, and a sync pauses engines in the middle of their rollouts instead
    of waiting for them."""
    save_every: int = Field(default=0, ge=0)
    """Save the policy every this many steps; 0 saves at the end only."""
    checkpoint_every: int = Field(default=10, ge=0)
    """Checkpoint the whole run every this many steps and at the end, so that `paceline train --resume` can go on from
    there; two checkpoints are kept, each of about three times the policy in float32. 0 keeps nothing, finished rollouts
    included."""
    sinks: tuple[Literal["console", "wandb", "tensorboard", "mlflow", "prometheus"], ...] = ("console",)
    """Where metrics go besides metrics.jsonl; each but the console is an extra, as in `pip install
    'paceline[tensorboard]'`."""
    prometheus_port: int = Field(default=9400, ge=1024, le=65535)
    """Where `sinks = ["prometheus"]` serves its gauges, on this machine's loopback only."""

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
    model: str = "arena:small"
    """A Hugging Face checkpoint directory, or `arena:tiny`, `arena:small`, `arena:large` for the built-in policies."""
