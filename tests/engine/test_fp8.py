"""FP8 in a real vLLM: after every push the engine holds what the reference makes of the weights, bit for bit, and its
scales."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from paceline.config import EngineConfig
from paceline.fp8 import KvScales, Sharding
from paceline.rollout.engine import VllmEngine
from paceline.rollout.internals.platform import has_amx
from paceline.types import GroupId, Receipt, RolloutRequest
from paceline.weights.fingerprint import mismatched
from paceline.weights.message import Push
from paceline.weights.shared_memory import ShmSender
from planted import allow_faults
from random_policy import make_policy

LAYERS = 2
QUANTIZED = {"self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"}


def scales(version: int, factor: float = 0.01) -> KvScales:
    return KvScales(version=version, q=(factor, factor), k=(factor, 2 * factor), v=(3 * factor, factor))


class Wire:
    def __init__(self, engine: VllmEngine, sender: ShmSender, runner: asyncio.Runner, path: Path) -> None:
        self.engine, self.sender, self.run, self.path = engine, sender, runner.run, path

    def weights(self, seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        stored = load_file(self.path / "model.safetensors")
        return {
            name: (x * (1 + 0.3 * torch.randn(x.shape, generator=generator))).bfloat16() for name, x in stored.items()
        }

    def stage(self, version: int, seed: int, factor: float = 0.01) -> Push:
        return self.sender.stage(version, self.weights(seed).items(), quantized=True, kv_scales=scales(version, factor))

    def deliver(self, push: Push) -> Receipt:
        return self.run(self.engine.receive(push))

    def held(self) -> dict[str, str]:
        return self.run(self.engine.rpc("applied_fingerprints"))[0]["policy"]["fingerprints"]

    def logp(self) -> list[float]:
        """Log-probabilities of one response: they change with weights and scales, and with nothing else."""

        async def rollout() -> list[float]:
            request = RolloutRequest(
                group_id=GroupId(0),
                index=0,
                prompt_ids=np.arange(10, 42, dtype=np.int32),
                max_tokens=8,
                temperature=1.0,
                seed=1,
            )
            await self.engine.submit([request])
            (found,) = await self.engine.collect()
            return found.logp.tolist()

        return self.run(rollout())


pytestmark = pytest.mark.skipif(not has_amx(), reason="vLLM's FP8 kernels for CPUs need AMX")


@pytest.fixture(scope="module")
def wire(runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    # k and v have 64 rows each, so that one block of 128 holds both: a reference that did not stack them would be
    # wrong.
    path = make_policy(tmp_path_factory.mktemp("policy"), hidden_size=256)
    config = EngineConfig(max_model_len=128, max_num_seqs=4, kv_cache_gb=0.05, weights="fp8", kv_cache="fp8")
    engine = runner.run(VllmEngine.start("engine-0", path, config, seed=0, adjust=allow_faults))
    sender = ShmSender()
    try:
        yield Wire(engine, sender, runner, path)
    finally:
        sender.close()
        runner.run(engine.close())


def test_quantized_tensors_are_the_reference_bit_for_bit_after_every_push(wire: Wire) -> None:
    """A stale scale, a layer that was left in BF16 or a packed copy of the old weights would differ."""
    for version in (1, 2, 3):
        push = wire.stage(version, seed=version)
        (quantized,) = push.quantized
        assert {name.split(".", 3)[3] for name in quantized} == {
            f"{layer}.weight.{part}" for layer in QUANTIZED for part in ("fp8", "scale")
        }
        receipt = wire.deliver(push)
        assert receipt.ok, receipt.error
        assert wire.held() == push.fingerprints_of(0)


def test_other_weights_have_other_fingerprints_in_every_tensor(wire: Wire) -> None:
    """Otherwise equality would say nothing."""
    (first,), (second,) = wire.stage(1, seed=1).quantized, wire.stage(1, seed=2).quantized
    assert mismatched(first, second) == tuple(sorted(first))


@pytest.mark.parametrize("part", ["fp8", "scale"])
def test_one_tensor_that_is_not_the_reference_is_in_the_receipt(wire: Wire, part: str) -> None:
    """As after a sync that left one tensor stale: what the engine holds is not what the sender's reference made."""
    name = f"model.layers.1.mlp.down_proj.weight.{part}"
    (stale,) = wire.stage(5, seed=6).quantized
    push = wire.stage(5, seed=5)
    push = replace(push, quantized=(dict(push.quantized[0]) | {name: stale[name]},))
    receipt = wire.deliver(push)
    assert (receipt.mismatched, receipt.ok, receipt.lost) == ((name,), False, True)
    wire.run(wire.engine.resume())
    assert wire.deliver(wire.stage(6, seed=6)).ok, "the engine itself is sound: the next tests go on with it"


def test_planted_fault_in_the_engine_is_found_where_its_kernel_reads(wire: Wire) -> None:
    """Fingerprints of what arrived would not see this: one bit of one layer, changed after loading."""
    push = wire.stage(7, seed=7)
    assert wire.deliver(push).ok
    fp8 = {
        name: value
        for name, value in push.fingerprints_of(0).items()
        if name not in {entry.name for entry in push.entries}
    }
    for kind, names in {
        "weight": ["model.layers.0.self_attn.qkv_proj.weight.fp8"],
        "scale": ["model.layers.0.self_attn.qkv_proj.weight.scale"],
        "kv_scales": [f"kv_scales.layers.{layer}.{part}" for layer in range(LAYERS) for part in "kqv"],
    }.items():
        assert wire.run(wire.engine.rpc("held_fp8")) == [fp8]
        wire.run(wire.engine.rpc("plant_fault", kind))
        (found,) = wire.run(wire.engine.rpc("held_fp8"))
        assert list(mismatched(fp8, found)) == names
        assert wire.deliver(push).ok, "a push repairs it"


def test_scales_are_read_back_and_matter(wire: Wire) -> None:
    assert wire.deliver(wire.stage(8, seed=8, factor=0.05)).ok
    fitting = wire.logp()
    assert wire.deliver(wire.stage(9, seed=8, factor=1e-4)).ok
    saturated = wire.logp()
    assert wire.deliver(wire.stage(10, seed=8, factor=0.05)).ok
    assert wire.logp() == fitting
    assert saturated != fitting
    assert all(math.isfinite(x) for x in saturated)


def test_stale_and_missing_scales_are_refused_and_leave_no_trace(wire: Wire) -> None:
    assert wire.deliver(wire.stage(11, seed=11)).ok
    before, held = wire.logp(), wire.held()
    weights = wire.weights(12)
    for bad, why in (
        (
            wire.sender.stage(12, weights.items(), quantized=True, kv_scales=scales(11)),
            "kv_scales: calibrated for version 11",
        ),
        (wire.sender.stage(12, weights.items(), quantized=True), "kv_scales: got 0; must be 2"),
        (
            wire.sender.stage(12, weights.items(), kv_scales=scales(12)),
            "weights: staged for an engine in full precision",
        ),
    ):
        receipt = wire.deliver(bad)
        assert receipt.error is not None
        assert receipt.error.startswith(why)
        assert not receipt.lost
    assert (wire.logp(), wire.held()) == (before, held)


def test_every_worker_of_a_tensor_parallel_engine_holds_the_reference_of_its_shard(
    runner: asyncio.Runner, wire: Wire, two_cpus: list[int]
) -> None:
    """Heads of 32 and parts of 64 rows: blocks of a worker begin where no block of the whole layer does."""
    config = wire.engine.config.model_copy(update={"tensor_parallel_size": 2})
    engine = runner.run(VllmEngine.start("engine-1", wire.path, config, seed=0, cpus=two_cpus))
    try:
        for version in (1, 2):
            push = wire.sender.stage(
                version,
                wire.weights(version).items(),
                quantized=True,
                sharding=Sharding(num_workers=2, num_kv_heads=2),
                kv_scales=scales(version),
            )
            assert mismatched(*push.quantized), "two equal shards would show nothing"
            receipt = runner.run(engine.receive(push))
            assert receipt.ok, receipt.error
            held = runner.run(engine.rpc("held_fp8"))
            for rank, worker in enumerate(held):
                assert push.fingerprints_of(rank).items() >= worker.items() >= push.quantized[rank].items()
    finally:
        runner.run(engine.close())
