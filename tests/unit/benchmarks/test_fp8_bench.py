"""Figures of the bench `fp8` from made-up step times."""

from __future__ import annotations

import pytest

from benchmarks.fp8 import ARMS, BATCHES, DRAFT_LENGTHS, DRAFTING_ARMS, Cell, Timings, compare_speed
from benchmarks.harness import Record

FASTER = {"bf16": 1.0, "weights": 1.25, "kv": 1.1, "both": 1.5}


@pytest.fixture
def record() -> Record:
    """Memory binds BF16 steps up to 8 tokens; above that FP8 loses. All but the last drafted token are accepted."""
    timings = {arm: Timings(capacity=2000 if "kv_cache" in ARMS[arm] else 1000) for arm in ARMS}
    for arm, found in timings.items():
        for cell in (Cell(b, k) for b in BATCHES for k in ((0, *DRAFT_LENGTHS) if arm in DRAFTING_ARMS else (0,))):
            num_tokens = cell.batch * (cell.k + 1)
            gain = FASTER[arm] if num_tokens <= 8 else 0.9 if arm != "bf16" else 1.0
            found.step_s[cell] = [0.05 * max(1.0, num_tokens / 8) / gain] * 3
            found.emitted[cell.k] += cell.k * 100
            found.rows[cell.k] += 100
    record = Record()
    compare_speed(record, timings)
    return record


def test_speedup_is_that_of_memory_bound_batches_only(record: Record) -> None:
    """A mean over all batches would hide where FP8 loses, and where it gains."""
    assert record.figures["fp8_plain_speedup"] == pytest.approx(1.5)
    # A batch of 1 gains 1.5. One of 2 does at k = 3 (180 tokens/s against 120), but BF16 has k = 5 to choose, with 133.
    assert record.figures["fp8_spec_speedup"] == pytest.approx((1.5 + 180 / (2 * 5 / 0.075)) / 2)
    assert record.details["memory_bound"] == [1, 2]
    assert record.figures["kv_capacity_ratio"] == 2.0
    over = record.details["over_bf16"]
    assert over["batch 32 k 3"]["both"] < 1 < over["batch 1 k 3"]["both"]


def test_tokens_per_second_count_what_is_accepted(record: Record) -> None:
    rates = record.details["tokens_per_s"]
    assert rates["batch 1 k 0"]["bf16"] == pytest.approx(20)
    assert rates["batch 2 k 3"]["bf16"] == pytest.approx(2 * 3 / 0.05)
    assert set(rates["batch 1 k 3"]) == set(DRAFTING_ARMS)
