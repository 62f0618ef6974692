"""Evaluation on held-out prompts."""

from __future__ import annotations

from pydantic import Field

from paceline.config.base import Section


class EvalConfig(Section):
    every: int = Field(default=10, ge=0)
    """Evaluate on held-out prompts every this many steps, and at the start and the end; 0 is never."""
    num_prompts: int = Field(default=256, ge=1)
    """Number of held-out prompts."""
    samples_per_prompt: int = Field(default=1, ge=1)
    """Rollouts per held-out prompt."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature of evaluation rollouts."""
