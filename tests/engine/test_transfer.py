"""The weight wire into a real vLLM: what is pushed is what samples, and what is refused leaves no trace."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3ForCausalLM

from paceline.config import EngineConfig
from paceline.rollout.engine import VllmEngine
from paceline.types import Floats, GroupId, Receipt, Rollout, RolloutRequest, Tokens
from paceline.weights.deliver import join
from paceline.weights.distributed import DistributedSender
from paceline.weights.message import Push
from paceline.weights.shared_memory import ShmSender

Weights = dict[str, torch.Tensor]
PROMPTS = ((5, 6, 7, 8, 9), (90, 2, 33), tuple(range(10, 40)))
# Largest difference from transformers' log-probabilities. In bfloat16 it is rounding, and other weights differ by far
# more.
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.3}


class Wire:
    """One engine and the sender that feeds it."""

    def __init__(self, engine: VllmEngine, sender: ShmSender, runner: asyncio.Runner, path: Path) -> None:
        self.engine = engine
        self.sender = sender
        self.path = path
        self.dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[engine.config.dtype]
        self.run = runner.run

    def changed_weights(self, seed: int) -> Weights:
        generator = torch.Generator().manual_seed(seed)
        stored = load_file(self.path / "model.safetensors")
        return {
            name: (x * (1 + 0.3 * torch.randn(x.shape, generator=generator))).to(self.dtype)
            for name, x in stored.items()
        }

    def deliver(self, push: Push) -> Receipt:
        return self.run(self.engine.receive(push))

    def held(self) -> dict[str, dict]:
        return self.run(self.engine.rpc("applied_fingerprints"))[0]

    def sample(self) -> list[Rollout]:
        async def rollouts() -> list[Rollout]:
            requests = [
                RolloutRequest(
                    group_id=GroupId(i),
                    index=0,
                    prompt_ids=np.array(ids, np.int32),
                    max_tokens=24,
                    temperature=1.0,
                    seed=3,
                )
                for i, ids in enumerate(PROMPTS)
            ]
            await self.engine.submit(requests)
            found: list[Rollout] = []
            while len(found) < len(requests):
                found.extend(await self.engine.collect())
            return sorted(found, key=lambda rollout: rollout.group_id)

        return self.run(rollouts())

    def probe(self) -> list[tuple[list[int], list[float]]]:
        """Tokens and log-probabilities, to be compared bit by bit."""
        return [(rollout.token_ids.tolist(), rollout.logp.tolist()) for rollout in self.sample()]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def wire(request: pytest.FixtureRequest, policy_path: Path, runner: asyncio.Runner) -> Iterator[Wire]:
    config = EngineConfig(dtype=request.param, max_model_len=128, max_num_seqs=4, kv_cache_gb=0.05)
    engine = runner.run(VllmEngine.start("engine-0", policy_path, config, seed=0))
    sender = ShmSender()
    try:
        yield Wire(engine, sender, runner, policy_path)
    finally:
        sender.close()
        runner.run(engine.close())


def reference_logp(path: Path, weights: Weights, dtype: torch.dtype, prompt: Tokens, response: Tokens) -> Floats:
    model = Qwen3ForCausalLM.from_pretrained(path, dtype=dtype)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], []), "tied to the embedding"
    ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
    with torch.no_grad():
        logits = model(ids[None]).logits[0].float()
    logp = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    return logp.gather(-1, ids[len(prompt) :, None])[:, 0].numpy()


def furthest(wire: Wire, weights: Weights, rollouts: list[Rollout]) -> float:
    gaps = [
        np.abs(
            rollout.logp - reference_logp(wire.path, weights, wire.dtype, rollout.prompt_ids, rollout.token_ids)
        ).max()
        for rollout in rollouts
    ]
    return float(max(gaps))


def test_every_update_samples_from_the_new_weights(wire: Wire) -> None:
    """Arrival is not enough: packed copies of the old weights would go on sampling."""
    tolerance = TOLERANCE[wire.engine.config.dtype]
    old = {name: tensor.to(wire.dtype) for name, tensor in load_file(wire.path / "model.safetensors").items()}
    for version in (1, 2, 3):
        new = wire.changed_weights(seed=version)
        push = wire.sender.stage(version, new.items())
        receipt = wire.deliver(push)
        assert receipt.ok, receipt.error
        assert wire.held()["policy"]["fingerprints"] == push.fingerprints_of(0)
        assert (wire.held()["policy"]["version"], wire.engine.policy_version) == (version, version)
        rollouts = wire.sample()
        assert {rollout.policy_version for rollout in rollouts} == {version}
        assert furthest(wire, new, rollouts) < tolerance
        assert furthest(wire, old, rollouts) > 3 * tolerance, "the probe cannot tell the versions apart"
        old = new


def test_overwriting_the_segment_after_a_sync_changes_nothing(wire: Wire) -> None:
    """A parameter that is a view of the segment would change under the engine while the next version is staged."""
    assert wire.deliver(wire.sender.stage(10, wire.changed_weights(seed=10).items())).ok
    before = wire.probe()
    wire.sender.stage(11, [(name, torch.zeros_like(x)) for name, x in wire.changed_weights(seed=10).items()])
    assert wire.probe() == before


def flipped_byte(wire: Wire, weights: Weights) -> Push:
    push = wire.sender.stage(21, weights.items())
    entry = next(entry for entry in push.entries if entry.name == "model.layers.1.mlp.up_proj.weight")
    with (Path("/dev/shm") / push.channel).open("r+b") as file:
        file.seek(entry.offset + 100)
        byte = file.read(1)[0]
        file.seek(entry.offset + 100)
        file.write(bytes([byte ^ 0x40]))
    return push


def not_a_number(wire: Wire, weights: Weights) -> Push:
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    return wire.sender.stage(21, weights.items())


def missing(wire: Wire, weights: Weights) -> Push:
    del weights["model.layers.1.mlp.up_proj.weight"]
    return wire.sender.stage(21, weights.items())


def unknown(wire: Wire, weights: Weights) -> Push:
    push = wire.sender.stage(21, weights.items())
    extra = replace(push.entries[0], name="model.layers.9.mlp.up_proj.weight")
    return replace(push, entries=(*push.entries, extra))


def misshapen(wire: Wire, weights: Weights) -> Push:
    weights["model.layers.1.mlp.up_proj.weight"] = weights["model.layers.1.mlp.up_proj.weight"].T
    return wire.sender.stage(21, weights.items())


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (flipped_byte, "model.layers.1.mlp.up_proj.weight: fingerprint is"),
        (not_a_number, "model.layers.1.mlp.up_proj.weight: holds a NaN"),
        (missing, "model.layers.1.mlp.up_proj.weight: missing"),
        (unknown, "model.layers.9.mlp.up_proj.weight: unknown"),
        (misshapen, "model.layers.1.mlp.up_proj.weight: got shape [64, 128]; must be [128, 64]"),
    ],
)
def test_bad_push_is_refused_by_name_and_leaves_no_trace(wire: Wire, bad, why: str) -> None:
    good = wire.sender.stage(20, wire.changed_weights(seed=20).items())
    assert wire.deliver(good).ok
    before, held = wire.probe(), wire.held()
    receipt = wire.deliver(bad(wire, wire.changed_weights(seed=21)))
    assert receipt.error is not None
    assert receipt.error.startswith(why)
    assert (receipt.ok, receipt.lost) == (False, False)
    assert wire.engine.policy_version == 20
    assert wire.held() == held
    assert wire.probe() == before


def test_good_push_after_a_refused_one_is_applied(wire: Wire) -> None:
    """A refusal must not leave vLLM's session open: the next start would fail."""
    assert not wire.deliver(missing(wire, wire.changed_weights(seed=30))).ok
    assert wire.deliver(wire.sender.stage(31, wire.changed_weights(seed=31).items())).ok
    assert wire.engine.policy_version == 31


def test_push_in_the_middle_of_rollouts_keeps_them(wire: Wire) -> None:
    """Asynchronous training: rollouts in flight go on with the new weights and say so."""

    async def overlap() -> list[Rollout]:
        request = RolloutRequest(
            group_id=GroupId(0),
            index=0,
            prompt_ids=np.array(PROMPTS[0], np.int32),
            max_tokens=100,
            temperature=1.0,
            seed=None,
        )
        await wire.engine.submit([replace(request, index=i) for i in range(4)])
        assert (await wire.engine.receive(push)).ok
        found: list[Rollout] = []
        while len(found) < 4:
            found.extend(await wire.engine.collect())
        return found

    push = wire.sender.stage(40, wire.changed_weights(seed=40).items())
    rollouts = wire.run(overlap())
    assert max(rollout.version_spans[-1][0] for rollout in rollouts) == 40


def test_drafter_push_is_refused_by_an_engine_without_one(wire: Wire) -> None:
    before = wire.probe()
    receipt = wire.deliver(wire.sender.stage(1, wire.changed_weights(seed=1).items(), target="drafter"))
    assert (receipt.error, receipt.lost) == ("drafter: this engine has none", False)
    assert wire.probe() == before


def test_pushes_by_broadcast_are_checked_and_loaded_like_those_through_shared_memory(wire: Wire) -> None:
    """The distributed transport over gloo: a good push samples, a bad one is refused after its bytes were taken, a good
    one again."""

    async def meet() -> None:
        address = sender.host("127.0.0.1", 1, 20.0)
        _, problem = await asyncio.gather(asyncio.to_thread(sender.join), join(wire.engine, address, 1))
        assert problem is None

    async def send(push: Push) -> Receipt:
        receipt, _ = await asyncio.gather(wire.engine.receive(push), asyncio.to_thread(sender.transmit))
        return receipt

    sender = DistributedSender(torch.device("cpu"))
    wire.run(meet())
    try:
        for version in (50, 51):
            new = wire.changed_weights(seed=version)
            push = sender.stage(version, new.items())
            receipt = wire.run(send(push))
            assert receipt.ok, receipt.error
            assert wire.held()["policy"]["fingerprints"] == push.fingerprints_of(0)
            assert furthest(wire, new, wire.sample()) < TOLERANCE[wire.engine.config.dtype]
            held, before = wire.held(), wire.probe()
            del new["model.layers.1.mlp.up_proj.weight"]
            receipt = wire.run(send(sender.stage(60, new.items())))
            assert (receipt.error, receipt.lost) == ("model.layers.1.mlp.up_proj.weight: missing from the push", False)
            receipt = wire.run(send(sender.stage(60, new.items(), target="drafter")))
            assert (receipt.error, receipt.lost) == ("drafter: this engine has none", False)
            assert (wire.held(), wire.probe()) == (held, before)
        receipt = wire.run(wire.engine.receive(replace(push, channel="paceline-other")))
        assert receipt.error is not None
        assert "has not joined" in receipt.error
    finally:
        sender.close()
    assert wire.deliver(wire.sender.stage(52, wire.changed_weights(seed=52).items())).ok, (
        "both transports serve one engine"
    )
