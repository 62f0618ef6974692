"""The figures of `python -m benchmarks precision` from made-up step times, and its page."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.precision import (
    ARMS,
    BATCHES,
    CONTEXTS,
    DRAFT_LENGTHS,
    DRAFTING_ARMS,
    PrecisionCell,
    Timings,
    _result,
)
from benchmarks.precision_page import write_precision_page
from paceline.measure import Result

FASTER = {"bf16": 1.0, "weights": 1.25, "kv": 1.1, "both": 1.5}


def made_up() -> Result:
    """BF16 steps are bound by memory up to 8 tokens; above that FP8 loses. Every draft is accepted whole but its last
    token."""
    timings = {arm: Timings(capacity=2000 if "kv_cache" in ARMS[arm] else 1000) for arm in ARMS}
    for arm, found in timings.items():
        for k in (0, *DRAFT_LENGTHS) if arm in DRAFTING_ARMS else (0,):
            for cell in (PrecisionCell(context, batch, k) for context in CONTEXTS for batch in BATCHES):
                num_tokens = cell.batch * (k + 1)
                seconds = 0.05 * max(1.0, num_tokens / 8)
                gain = FASTER[arm] if num_tokens <= 8 else 0.9 if arm != "bf16" else 1.0
                found.step_s[cell] = [seconds / gain] * 3
                found.emitted[k] += k * 100
                found.rows[k] += 100
    k3 = {arm: {"off": 1e-5 * (place + 1), "on": 1.1e-5 * (place + 1)} for place, arm in enumerate(ARMS)}
    return _result(timings, k3, {"model": "m", "trained": "t"}, 0, 0.0)


def test_speedup_is_that_of_memory_bound_batches_only() -> None:
    """A mean over all batches would hide where FP8 loses, and where it gains."""
    result = made_up()
    assert result.figures["fp8_plain_speedup"] == pytest.approx(1.5)
    # A batch of 1 gains 1.5. One of 2 does at k = 3 (180 tokens/s against 120), but BF16 has k = 5 to choose, with 133.
    assert result.figures["fp8_spec_speedup"] == pytest.approx((1.5 + 180 / (2 * 5 / 0.075)) / 2)
    assert result.details["memory_bound"] == ["short 1", "short 2", "long 1", "long 2"]
    assert result.figures["kv_capacity_ratio"] == 2.0
    assert "both short 32 k=3" in result.details["loses_at"]
    assert "both short 1 k=3" not in result.details["loses_at"]


def test_tokens_per_second_count_what_is_accepted() -> None:
    rates = made_up().details["tokens_per_s"]
    assert rates["short batch 1 k 0"]["bf16"] == pytest.approx(20)
    assert rates["short batch 2 k 3"]["bf16"] == pytest.approx(2 * 3 / 0.05)
    assert set(rates["short batch 1 k 3"]) == set(DRAFTING_ARMS)


def test_every_arm_has_its_mismatch() -> None:
    figures = made_up().figures
    assert {name for name in figures if name.startswith("k3_")} == {
        f"k3_{arm}{spec}" for arm in ARMS for spec in ("", "_spec")
    }


def test_page_shows_every_figure(tmp_path: Path) -> None:
    result = made_up()
    write_precision_page(result, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 2
    assert "mathdefault" not in page  # a tick label that nobody can read
    assert all(name.replace("_", " ") in page for name in result.figures)
