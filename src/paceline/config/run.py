"""The run and the policy that it trains."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from paceline.config.base import Adjustable, Section


class RunConfig(Section):
    name: Adjustable[str] = Field(default="run", max_length=100)
    """Name of the run's directory: letters, digits, `.`, `_` and `-`, the first of them a letter or digit."""
    directory: Adjustable[Path] = Path("runs")
    """Directory in which run directories are created. An existing run is never overwritten: a number is added to the
    name."""
    steps: Adjustable[int] = Field(default=40, ge=1)
    """Number of RL steps, each one policy update."""
    seed: int = 0
    """Seed of the order of the data, the engines' sampling and the learner."""
    max_age: int = Field(default=0, ge=0)
    """How many policy versions older than the policy a token may be when it is trained on. 0 is synchronous: a batch is
    sampled by one policy version. Above 0 engines go on while the learner works, with up to `max_age + 1` batches of
    groups in flight; the learner takes the first groups that have finished, and a sync pauses engines in the middle of
    their rollouts instead of waiting for them."""
    too_old: Literal["wait", "abort"] = "wait"
    """What happens when a group that is still sampled would be older than `max_age` in every later step. `wait`: the
    learner waits for it. `abort`: it is given up and sampled anew from the present policy; nobody waits, but what is
    given up is lost, and long answers are given up more often than short ones, so that the policy is trained on shorter
    answers than it gives."""
    save_every: Adjustable[int] = Field(default=0, ge=0)
    """Save the policy every this many steps; 0 saves at the end only."""
    checkpoint_every: Adjustable[int] = Field(default=10, ge=0)
    """Checkpoint the whole run every this many steps and at the end, so that `paceline train --resume` can go on from
    there; two checkpoints are kept, each of about three times the policy in float32. 0 keeps nothing, finished rollouts
    included."""
    sinks: Adjustable[tuple[Literal["console", "wandb", "tensorboard", "mlflow", "prometheus"], ...]] = ("console",)
    """Where metrics go besides metrics.jsonl; each but the console is an extra, as in `pip install
    'paceline[tensorboard]'`."""
    prometheus_port: Adjustable[int] = Field(default=9400, ge=1024, le=65535)
    """Where `sinks = ["prometheus"]` serves its gauges, on this machine's loopback only."""

    @model_validator(mode="before")
    @classmethod
    def _no_lag(cls, tree: Any) -> Any:
        if isinstance(tree, dict) and "lag" in tree:
            raise ValueError(
                f"run.lag: got {tree['lag']!r}; must be run.max_age, in policy versions, because groups are trained on "
                "as they finish and not in whole batches; the same number keeps the same bound"
            )
        return tree

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
