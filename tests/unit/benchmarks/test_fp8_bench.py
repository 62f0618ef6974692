"""Figures of the bench `fp8` from made-up step times."""

from __future__ import annotations

import pytest

from benchmarks.fp8 import ARMS, BATCHES, LENGTHS, compare_speed
from benchmarks.harness import Record
from paceline.selector.cost import Step

FASTER = {"bf16": 1.0, "weights": 1.25, "kv": 1.1, "both": 1.5}


def step(arm: str, batch: int, k: int) -> Step:
    """Memory binds BF16 steps up to 8 tokens; above that FP8 loses. All but the last drafted token are accepted."""
    num_tokens = batch * (k + 1)
    gain = FASTER[arm] if num_tokens <= 8 else 0.9 if arm != "bf16" else 1.0
    return Step(
        num_requests=batch,
        num_prefill_tokens=0,
        context_tokens=100,
        verified=k,
        drafted=k,
        seconds=0.05 * max(1.0, num_tokens / 8) / gain,
        proposed_at=(),
        accepted_at=(),
        num_emitted=batch * max(k, 1),
    )


@pytest.fixture
def record() -> Record:
    record = Record()
    compare_speed(record, {arm: {(b, k): [step(arm, b, k)] * 3 for b in BATCHES for k in LENGTHS} for arm in ARMS})
    return record


def test_speedup_is_that_of_memory_bound_batches_only(record: Record) -> None:
    """A mean over all batches would hide where FP8 loses, and where it gains."""
    assert record.figures["fp8_plain_speedup"] == pytest.approx(1.5)
    # A batch of 1 gains 1.5. One of 2 does at k = 3 (180 tokens/s against 120), but BF16 has k = 5 to choose, with 133.
    assert record.figures["fp8_spec_speedup"] == pytest.approx((1.5 + 180 / (2 * 5 / 0.075)) / 2)
    assert record.details["memory_bound"] == [1, 2]


def test_tokens_per_second_count_accepted_tokens(record: Record) -> None:
    rates = record.details["tokens_per_s"]
    assert rates["batch 1 k 0"]["bf16"] == pytest.approx(20)
    assert rates["batch 2 k 3"]["bf16"] == pytest.approx(2 * 3 / 0.05)
    assert rates["batch 32 k 3"]["both"] < rates["batch 32 k 3"]["bf16"]
