"""Paceline's scheduler with a random draft length at every step under BEG-MAB; vLLM loads it by name."""

from paceline.rollout.scheduler import AdaptiveScheduler
from paceline.selector import select

__all__ = ["AdaptiveScheduler"]

select.EPSILON = 1.0
