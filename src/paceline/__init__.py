"""Paceline: fast rollouts for RL post-training, on stock engines, with proof."""

__version__ = "0.2.0"
