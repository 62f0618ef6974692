"""Contexts and configs for jobs that tests start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paceline.config import Config, LearnerConfig, load_config
from paceline.context import Context

ARENA = Path(load_config.__code__.co_filename).parents[1] / "configs" / "arena.toml"
NOWHERE = Path("/nonexistent")


def make_context(cache_root: Path = NOWHERE, report: Callable[[str], None] = lambda line: None) -> Context:
    """Return a context that reports nowhere and, unless told where, cannot cache."""
    return Context(report=report, cache_root=cache_root)


def arena_config(overrides: Sequence[str] = ()) -> Config:
    """Return configs/arena.toml with `a.b=value` overrides."""
    return load_config(ARENA, overrides)


def one_rank(**settings: Any) -> LearnerConfig:
    """Return the settings of a learner in this process, in float32."""
    return LearnerConfig.model_validate({"world_size": 1, "dtype": "float32", **settings})
