"""The tail of batches, where at most two requests are active, pooled over those that are compared."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from paceline.rollout.stepped import SteppedBatch

TAIL_REQUESTS, TAIL_TOKENS = 2, 500
Group = Mapping[str, SteppedBatch]
"""Batches by name of the arm, of arms that took turns."""
Round = Sequence[Group]


def wants_more(rounds: Sequence[Round], wanted: int) -> bool:
    """Whether rounds or tokens of the tail are missing; a batch without any tail will have none however often."""
    if len(rounds) < wanted:
        return True
    tokens = [tail(compared(rounds, arm))[0] for arm in ("plain", "selector")]
    return 0 < min(tokens) < TAIL_TOKENS


def compared(rounds: Sequence[Round], arm: str) -> list[SteppedBatch]:
    """Batches of an arm from the groups that have plain vLLM and the selector side by side."""
    return [group[arm] for groups in rounds for group in groups if "plain" in group and "selector" in group]


def tail(batches: Sequence[SteppedBatch]) -> tuple[int, float]:
    """Tokens and seconds while at most two requests are active."""
    tokens, seconds = 0, 0.0
    for batch in batches:
        if batch.steps:
            found = [(one.num_emitted, one.seconds) for one in batch.steps if one.num_requests <= TAIL_REQUESTS]
        else:
            found = [step for step in batch.step_s if step[0] <= TAIL_REQUESTS]  # plain: a token each
        tokens += sum(emitted for emitted, _ in found)
        seconds += sum(step_s for _, step_s in found)
    return tokens, seconds


def tail_rate(batches: Sequence[SteppedBatch]) -> float:
    tokens, seconds = tail(batches)
    return tokens / seconds if seconds else math.nan


def tail_ratios(rounds: Sequence[Round]) -> list[float]:
    """Selector over plain in each round that has a tail; not a number if none has."""
    each = [tail_rate(compared([groups], "selector")) / tail_rate(compared([groups], "plain")) for groups in rounds]
    return [ratio for ratio in each if math.isfinite(ratio)] or [math.nan]
