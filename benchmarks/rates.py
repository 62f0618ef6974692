"""Tokens per second of batches by number of active requests.

Time and tokens of a step at (batch, k) do not depend on a table's entries for other batch sizes. The time of a table is
a sum over its entries, so the best of all tables has the best draft length of each bucket of batch sizes.
"""

from __future__ import annotations

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


def speedup_by_batch(groups: Sequence[Group]) -> dict[str, float]:
    """Return tokens per second of the selector over plain vLLM by batch size, in steps that read no prompts."""
    plain = _plain_token_s([group["plain"] for group in groups])
    chosen = _by_bucket([group["selector"] for group in groups])
    return {name_of(bucket): rate(chosen[bucket]) * plain[bucket] for bucket in plain if bucket in chosen}
