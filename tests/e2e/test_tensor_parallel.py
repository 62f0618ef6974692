"""A tensor-parallel engine with a drafter where the product runs it: inside a Ray actor that stands in a placement
group."""

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

from driven_engine import furthest, reference
from paceline.cluster.actors import EngineActor
from paceline.cluster.proxies import RemoteEngine
from paceline.config import EngineConfig, SpeculationConfig
from paceline.drafters.checkpoint import with_own_embeddings
from paceline.drafters.rounds import drafter_weights
from paceline.orchestrator.generate import generate_all
from paceline.types import GroupId, Rollout, RolloutRequest
from paceline.weights.message import Target
from paceline.weights.shared_memory import ShmSender
from random_policy import make_drafter, make_policy
from specs import engine_settings, engine_spec

pytestmark = pytest.mark.timeout(1800)

CONFIG = EngineConfig(
    dtype="float32",
    tensor_parallel_size=2,
    max_model_len=128,
    max_num_seqs=4,
    kv_cache_gb=0.05,
    deadline_s=600,
)
"""Deadlines for a busy machine: two workers wait for each other in every layer."""
PROMPTS = ((5, 6, 7, 8, 9), (90, 2, 33), tuple(range(10, 40)))


def probing_actor() -> type:
    """An EngineActor that also tells what each worker holds. Made here, so that Ray ships it by value."""

    class ProbingActor(EngineActor):
        async def ask_workers(self, method: str) -> list[Any]:
            return await self._engine.rpc(method)

    return ProbingActor


class TwoWorkers:
    def __init__(self, engine: RemoteEngine, runner: asyncio.Runner, policy: Path, drafter: Path) -> None:
        self.engine, self.run, self.policy, self.drafter = engine, runner.run, policy, drafter

    def ask_workers(self, method: str) -> list[Any]:
        async def answer() -> list[Any]:
            return await self.engine.actor.ask_workers.remote(method)

        return self.run(answer())

    def sample(self) -> list[Rollout]:
        requests = [
            RolloutRequest(
                group_id=GroupId(i), index=0, prompt_ids=np.array(ids, np.int32), max_tokens=24, temperature=1.0
            )
            for i, ids in enumerate(PROMPTS)
        ]
        return self.run(generate_all(self.engine, requests))

    def push(self, version: int, weights: dict[str, torch.Tensor], target: Target = "policy") -> None:
        """Push into every worker and see that it holds it."""
        sender = ShmSender()
        try:
            push = sender.stage(version, weights.items(), target=target)
            receipt = self.run(self.engine.receive(push))
        finally:
            sender.close()
        assert receipt.ok, receipt.error
        held = self.ask_workers("applied_fingerprints")
        assert len(held) == 2
        for worker in held:
            assert (worker[target]["version"], worker[target]["fingerprints"]) == (version, push.fingerprints_of(0))

    def gap(self, weights: dict[str, torch.Tensor], rollouts: list[Rollout]) -> float:
        """Largest difference between log-probabilities of the engine and of these weights on one device."""
        return furthest(rollouts, reference(self.policy, weights, rollouts))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoWorkers]:
    """One engine with two workers, a core each, and an untrained drafter."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("each worker needs a core of its own")
    path = make_policy(tmp_path_factory.mktemp("policy"))
    folder = tmp_path_factory.mktemp("drafter")
    drafter = make_drafter(path, folder / "equal")
    drafter = with_own_embeddings(drafter, folder / "own", model_path=path, dtype=torch.float32)
    speculation = SpeculationConfig.model_validate(
        {
            "drafter": {"kind": "eagle3", "path": str(drafter)},
            "max_draft_length": 3,
            "selector": {"kind": "fixed", "draft_length": 3},
        }
    )
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _system_config={"worker_niceness": 0},  # as in a run
    )
    with asyncio.Runner() as runner:
        try:
            group = placement_group([{"CPU": 1.0}])
            assert group.wait(60)
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
            actor = ray.remote(probing_actor()).options(num_cpus=1, scheduling_strategy=strategy).remote()
            spec = engine_spec(
                model_path=str(path), settings=engine_settings(CONFIG, speculation), cores=tuple(cores[:2])
            )
            found = RemoteEngine(actor, spec)
            runner.run(found.start())
            yield TwoWorkers(found, runner, path, drafter)
            runner.run(found.close())
        finally:
            ray.shutdown()


def test_engine_starts_with_two_workers_and_samples_from_its_checkpoint(engine: TwoWorkers) -> None:
    """Left to choose, vLLM takes its Ray executor inside a placement group, which has no bundles for its workers."""
    workers = engine.ask_workers("paceline_processes")
    assert len({worker for worker, _ in workers}) == 2 and len({core for _, core in workers}) == 1
    rollouts = engine.sample()
    assert sum(rollout.num_drafted for rollout in rollouts) > 0
    assert engine.gap(load_file(engine.policy / "model.safetensors"), rollouts) < 1e-4


def test_push_reaches_every_shard(engine: TwoWorkers) -> None:
    """A worker that kept its old shard would sample from a mixture of two policies, which no fingerprint of the
    message alone can show; so log-probabilities are compared too."""
    generator = torch.Generator().manual_seed(1)
    old = load_file(engine.policy / "model.safetensors")
    new = {name: x * (1 + 0.3 * torch.randn(x.shape, generator=generator)) for name, x in old.items()}
    engine.push(1, new)
    rollouts = engine.sample()
    assert {rollout.policy_version for rollout in rollouts} == {1}
    assert engine.gap(new, rollouts) < 1e-4
    assert engine.gap(old, rollouts) > 0.1, "the weights were changed enough for a stale shard to show"


def test_pushed_drafter_reaches_every_shard(engine: TwoWorkers) -> None:
    """A policy and a drafter to which all tokens are alike: every draft is accepted, unless a worker kept the old part
    of the drafter's head."""
    even = load_file(engine.policy / "model.safetensors")
    even["model.embed_tokens.weight"].zero_()  # the output head too
    engine.push(2, even)
    before = engine.sample()
    assert sum(rollout.num_accepted for rollout in before) < sum(rollout.num_drafted for rollout in before)
    drafter = drafter_weights(engine.drafter / "model.safetensors")
    drafter["lm_head.weight"] = torch.zeros_like(drafter["lm_head.weight"])
    engine.push(1, drafter, "drafter")
    rollouts = engine.sample()
    assert {rollout.policy_version for rollout in rollouts} == {2}
    assert engine.gap(even, rollouts) < 1e-4
    assert sum(r.num_drafted for r in rollouts) == sum(r.num_accepted for r in rollouts) > 0
