"""Tokens per second of the bench's batches by batch size, and what follows from them.

What a step at (batch, k) costs and emits does not depend on what a table says for other batch sizes. So a table's time
is a sum over its entries, and the search over all tables is an argmax for each bucket of batch sizes: exhaustive
without trying each one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median

from benchmarks.tail import Group
from benchmarks.workload import rate
from paceline.rollout.stepped import SteppedBatch
from paceline.selector.cost import Step

BUCKETS = ((1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 32), (33, 64))
Bucket = tuple[int, int]


def bucket_of(num_requests: int) -> Bucket:
    return next(bucket for bucket in BUCKETS if bucket[0] <= num_requests <= bucket[1])


def _by_bucket(batches: Sequence[SteppedBatch]) -> dict[Bucket, list[Step]]:
    found: dict[Bucket, list[Step]] = defaultdict(list)
    for batch in batches:
        for step in batch.steps:
            if step.num_prefill_tokens == 0:
                found[bucket_of(step.num_requests)].append(step)
    return found


def best_table(survey: Mapping[int, Sequence[SteppedBatch]]) -> list[tuple[int, int, int]]:
    """The draft length with the highest rate in each bucket of batch sizes."""
    rates: dict[Bucket, dict[int, float]] = defaultdict(dict)
    for k, batches in survey.items():
        for bucket, steps in _by_bucket(batches).items():
            rates[bucket][k] = rate(steps)
    return [(*bucket, max(by_k, key=by_k.__getitem__)) for bucket, by_k in sorted(rates.items())]


def name_of(bucket: Bucket) -> str:
    return f"{bucket[0]}-{bucket[1]}"


def _plain_token_s(batches: Sequence[SteppedBatch]) -> dict[Bucket, float]:
    """Seconds of plain vLLM for a token by batch size: medians, because some steps read prompts too."""
    found: dict[Bucket, list[float]] = defaultdict(list)
    for batch in batches:
        for active, seconds in batch.step_s:
            found[bucket_of(active)].append(seconds / active)
    return {bucket: median(token_s) for bucket, token_s in sorted(found.items())}


def rate_by_batch(
    survey: Mapping[int, Sequence[SteppedBatch]], plain: Sequence[SteppedBatch]
) -> dict[str, dict[str, float]]:
    """Tokens per second by batch size and draft length."""
    rates = {name_of(bucket): {"plain": 1 / token_s} for bucket, token_s in _plain_token_s(plain).items()}
    for k, batches in survey.items():
        for bucket, steps in sorted(_by_bucket(batches).items()):
            rates.setdefault(name_of(bucket), {})[str(k)] = rate(steps)
    return rates


def speedup_by_batch(groups: Sequence[Group]) -> dict[str, float]:
    """Tokens per second of the selector over plain vLLM by batch size, in steps that read no prompts."""
    plain = _plain_token_s([group["plain"] for group in groups])
    chosen = _by_bucket([group["selector"] for group in groups])
    return {name_of(bucket): rate(chosen[bucket]) * plain[bucket] for bucket in plain if bucket in chosen}


def limit(group: Group) -> float:
    """Upper limit of the speed-up: accepted length x plain step / speculative step, weighted by where the selector's
    tokens are. No schedule of draft lengths with these step times can be faster."""
    plain = _plain_token_s([group["plain"]])
    plain_s = speculative_s = 0.0
    for bucket, steps in _by_bucket([group["selector"]]).items():
        if bucket in plain:
            plain_s += sum(step.num_emitted for step in steps) * plain[bucket]
            speculative_s += sum(step.seconds for step in steps)
    return plain_s / speculative_s
