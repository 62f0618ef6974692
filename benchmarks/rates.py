"""Tokens per second of batches by number of active requests, and in their tail.

Time and tokens of a step at (batch, k) do not depend on a table's entries for other batch sizes. The time of a table is
a sum over its entries, so the best of all tables has the best draft length of each bucket of batch sizes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median

from paceline.rollout.stepped import SteppedBatch
from paceline.selector.cost import Step

BUCKETS = ((1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 32), (33, 64))
Bucket = tuple[int, int]
Group = Mapping[str, SteppedBatch]
"""Batches of arms that took turns, by arm."""
Round = Sequence[Group]
TAIL_REQUESTS, TAIL_TOKENS = 2, 500


def bucket_of(num_requests: int) -> Bucket:
    return next(bucket for bucket in BUCKETS if bucket[0] <= num_requests <= bucket[1])


def name_of(bucket: Bucket) -> str:
    return f"{bucket[0]}-{bucket[1]}"


def rate(steps: Sequence[Step]) -> float:
    """Return tokens per second."""
    return sum(step.num_emitted for step in steps) / sum(step.seconds for step in steps)


def _by_bucket(batches: Sequence[SteppedBatch]) -> dict[Bucket, list[Step]]:
    """Return the steps that read no prompts."""
    found: dict[Bucket, list[Step]] = defaultdict(list)
    for batch in batches:
        for step in batch.steps:
            if step.num_prefill_tokens == 0:
                found[bucket_of(step.num_requests)].append(step)
    return found


def best_table(survey: Mapping[int, Sequence[SteppedBatch]]) -> list[tuple[int, int, int]]:
    """Return the draft length with the highest rate for each bucket."""
    rates: dict[Bucket, dict[int, float]] = defaultdict(dict)
    for k, batches in survey.items():
        for bucket, steps in _by_bucket(batches).items():
            rates[bucket][k] = rate(steps)
    return [(*bucket, max(by_k, key=by_k.__getitem__)) for bucket, by_k in sorted(rates.items())]


def _plain_token_s(batches: Sequence[SteppedBatch]) -> dict[Bucket, float]:
    """Return seconds of plain vLLM per token: medians, because some steps read prompts too."""
    found: dict[Bucket, list[float]] = defaultdict(list)
    for batch in batches:
        for active, seconds in batch.step_s:
            found[bucket_of(active)].append(seconds / active)
    return {bucket: median(token_s) for bucket, token_s in sorted(found.items())}


def rate_by_batch(
    survey: Mapping[int, Sequence[SteppedBatch]], plain: Sequence[SteppedBatch]
) -> dict[str, dict[str, float]]:
    """Return tokens per second by batch size and draft length."""
    rates = {name_of(bucket): {"plain": 1 / token_s} for bucket, token_s in _plain_token_s(plain).items()}
    for k, batches in survey.items():
        for bucket, steps in sorted(_by_bucket(batches).items()):
            rates.setdefault(name_of(bucket), {})[str(k)] = rate(steps)
    return rates


def speedup_by_batch(groups: Sequence[Group]) -> dict[str, float]:
    """Return tokens per second of the selector over plain vLLM by batch size, in steps that read no prompts."""
    plain = _plain_token_s([group["plain"] for group in groups])
    chosen = _by_bucket([group["selector"] for group in groups])
    return {name_of(bucket): rate(chosen[bucket]) * plain[bucket] for bucket in plain if bucket in chosen}


def wants_more(rounds: Sequence[Round], wanted: int) -> bool:
    """Return whether rounds or tokens of the tail are missing. A batch without a tail is not repeated for one."""
    if len(rounds) < wanted:
        return True
    return 0 < min(tail(compared(rounds, arm))[0] for arm in ("plain", "selector")) < TAIL_TOKENS


def compared(rounds: Sequence[Round], arm: str) -> list[SteppedBatch]:
    """Return the arm's batches from the groups that have plain vLLM and the selector side by side."""
    return [group[arm] for groups in rounds for group in groups if "plain" in group and "selector" in group]


def tail(batches: Sequence[SteppedBatch]) -> tuple[int, float]:
    """Return tokens and seconds of the steps with at most two active requests."""
    steps = [
        # Plain vLLM has a token per request and step.
        one
        for batch in batches
        for one in (
            [(s.num_requests, s.num_emitted, s.seconds) for s in batch.steps] or [(n, n, s) for n, s in batch.step_s]
        )
        if one[0] <= TAIL_REQUESTS
    ]
    return sum(emitted for _, emitted, _ in steps), sum(seconds for _, _, seconds in steps)


def tail_rate(batches: Sequence[SteppedBatch]) -> float:
    tokens, seconds = tail(batches)
    return tokens / seconds if seconds else math.nan


def tail_ratios(rounds: Sequence[Round]) -> list[float]:
    """Return selector over plain of each round with a tail, or NaN if there is none."""
    each = [tail_rate(compared([groups], "selector")) / tail_rate(compared([groups], "plain")) for groups in rounds]
    return [ratio for ratio in each if math.isfinite(ratio)] or [math.nan]
