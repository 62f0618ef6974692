"""Scales of an FP8 KV cache pushed into V2, which hands attention its layers in a way of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from driven_engine import V2_CONFIG, DrivenEngine, started
from paceline.fp8 import KvScales
from paceline.weights.shared_memory import ShmSender


@pytest.fixture(scope="module")
def fp8(policy_path: Path) -> Iterator[DrivenEngine]:
    config = V2_CONFIG.model_copy(update={"dtype": "bfloat16", "kv_cache": "fp8"})
    yield from started(policy_path, config=config, async_scheduling=True)


def test_pushed_kv_scales_are_held_and_matter(fp8: DrivenEngine) -> None:
    """Scales that arrive where V2's attention does not read them would leave the cache saturated, or coarse."""
    sender = ShmSender()
    weights = {name: x.bfloat16() for name, x in fp8.weights().items()}

    def logp_with(version: int, factor: float) -> list[float]:
        scales = KvScales(version=version, q=(factor,) * 2, k=(factor, 2 * factor), v=(3 * factor, factor))
        push = sender.stage(version, weights.items(), kv_scales=scales)
        receipt = fp8.run(fp8.engine.receive(push))
        assert receipt.ok, receipt.error
        (held,) = fp8.rpc("applied_fingerprints")
        assert held["policy"]["fingerprints"] == push.fingerprints_of(0)
        return fp8.sample([tuple(range(2, 15))], max_tokens=6, seed=1)[0].logp.tolist()

    try:
        fitting, saturated, again = (logp_with(version, x) for version, x in ((1, 0.05), (2, 1e-4), (3, 0.05)))
    finally:
        sender.close()
    assert fitting == again != saturated
