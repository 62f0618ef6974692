"""A tensor-parallel engine where the product runs it: inside a Ray actor that stands in a placement group."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from safetensors.torch import load_file
from transformers import Qwen3ForCausalLM

from paceline.cluster.actors import EngineActor
from paceline.cluster.proxies import RemoteEngine
from paceline.config import EngineConfig
from paceline.types import Rollout, RolloutRequest
from paceline.weights.shared_memory import ShmSender
from random_policy import make_policy

CONFIG = EngineConfig(
    dtype="float32", tensor_parallel_size=2, max_model_len=128, max_num_seqs=4, kv_cache_gb=0.05, start_deadline_s=400
)
PROMPTS = ((5, 6, 7, 8, 9), (90, 2, 33), tuple(range(10, 40)))


def probing_actor() -> type:
    """An EngineActor that also tells what each worker holds. Made here, so that Ray ships it by value."""

    class ProbingActor(EngineActor):
        async def ask_workers(self, method: str) -> list[Any]:
            return await self._engine.rpc(method)

    return ProbingActor


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RemoteEngine, Path, asyncio.Runner]]:
    """One engine with two workers, a core each."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("each worker needs a core of its own")
    path = make_policy(tmp_path_factory.mktemp("policy"))
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    with asyncio.Runner() as runner:
        try:
            group = placement_group([{"CPU": 1.0}])
            assert group.wait(60)
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
            actor = ray.remote(probing_actor()).options(num_cpus=1, scheduling_strategy=strategy).remote()
            found = RemoteEngine("engine-0", actor, CONFIG)
            runner.run(found.start(str(path), 0, cores[:2], None, "cpu"))
            yield found, path, runner
            runner.run(found.close())
        finally:
            ray.shutdown()


async def sample(engine: RemoteEngine) -> list[Rollout]:
    requests = [
        RolloutRequest(group_id=i, index=0, prompt_ids=np.array(ids, np.int32), max_tokens=24, temperature=1.0)
        for i, ids in enumerate(PROMPTS)
    ]
    await engine.submit(requests)
    found: list[Rollout] = []
    while len(found) < len(requests):
        found.extend(await engine.collect())
    return found


def furthest(path: Path, weights: dict[str, torch.Tensor], rollouts: list[Rollout]) -> float:
    """Largest difference between the engine's log-probabilities and those of these weights on one device."""
    model = Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], []), "tied to the embedding"
    gaps = []
    for rollout in rollouts:
        ids = torch.from_numpy(np.concatenate([rollout.prompt_ids, rollout.token_ids]).astype(np.int64))
        with torch.no_grad():
            logp = torch.log_softmax(model(ids[None]).logits[0].float(), -1)[len(rollout.prompt_ids) - 1 : -1]
        reference = logp.gather(-1, ids[len(rollout.prompt_ids) :, None])[:, 0].numpy()
        gaps.append(np.abs(rollout.logp - reference).max())
    return float(max(gaps))


def test_engine_starts_with_two_workers_and_samples_from_its_checkpoint(engine) -> None:
    """Left to choose, vLLM takes its Ray executor inside a placement group, which has no bundles for its workers."""
    remote, path, runner = engine
    workers = runner.run(_plain(remote.actor.ask_workers.remote("paceline_processes")))
    assert len({worker for worker, _ in workers}) == 2 and len({core for _, core in workers}) == 1
    rollouts = runner.run(sample(remote))
    assert furthest(path, load_file(path / "model.safetensors"), rollouts) < 1e-4


def test_push_reaches_every_shard(engine) -> None:
    """A worker that kept its old shard would sample from a mixture of two policies, which no fingerprint of the
    message alone can show; so log-probabilities are compared too."""
    remote, path, runner = engine
    generator = torch.Generator().manual_seed(1)
    old = load_file(path / "model.safetensors")
    new = {name: x * (1 + 0.3 * torch.randn(x.shape, generator=generator)) for name, x in old.items()}
    sender = ShmSender()
    try:
        push = sender.stage(1, new.items())
        receipt = runner.run(remote.receive(push))
    finally:
        sender.close()
    assert receipt.ok, receipt.error
    held = runner.run(_plain(remote.actor.ask_workers.remote("applied_fingerprints")))
    assert len(held) == 2
    for worker in held:
        assert (worker["policy"]["version"], worker["policy"]["fingerprints"]) == (1, push.fingerprints)
    rollouts = runner.run(sample(remote))
    assert {rollout.policy_version for rollout in rollouts} == {1}
    assert furthest(path, new, rollouts) < 1e-4
    assert furthest(path, old, rollouts) > 0.1, "the weights were changed enough for a stale shard to show"


async def _plain(answer: Any) -> Any:
    return await answer
