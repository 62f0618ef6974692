"""Drafter training beside a real run: two engines, a learner, and a trainer that is killed in the middle of its
work."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import numpy as np

from contexts import arena_config
from paceline.cluster.placement import start_cluster
from paceline.drafters.provenance import Provenance, read_evaluation, read_provenance
from paceline.metrics import JsonlSink, Recorder, read_metrics
from paceline.orchestrator.loop import Parts, train
from paceline.types import Prompt
from random_policy import make_drafter, make_policy

SETTINGS = [
    "run.steps=8",
    "rollout.prompts_per_step=4",
    "rollout.group_size=4",
    "rollout.max_tokens=400",
    "rollout.engine.max_model_len=448",
    "rollout.engine.kv_cache_gb=0.25",
    "rollout.engine.max_num_seqs=16",
    "learner.learning_rate=1e-3",
    "eval.every=0",
    "speculation.drafter.kind=eagle3",
    "speculation.max_draft_length=3",
    # Leases of a given length after every update: how long engines are idle depends on what else the machine does.
    "speculation.training.mode=inline",
    "speculation.training.inline_s=3",
    "speculation.training.when=always",
    "speculation.training.tokens_per_step=256",
    "speculation.training.round_tokens=256",
    "speculation.training.buffer.heldout_share=0.2",
]


def test_killed_trainer_costs_no_rollout_and_no_wrong_weight(tmp_path: Path) -> None:
    """SIGKILL in the middle of a slice: every rollout still comes, on a policy that both ends agree on, and training
    goes on."""
    model = make_policy(tmp_path / "model")
    drafter = make_drafter(model, tmp_path / "drafter")
    shared = tmp_path / "shared"
    places = [f'speculation.drafter.path="{drafter}"', f'speculation.training.buffer.directory="{shared}"']
    config = arena_config([*SETTINGS, *places])
    recorder = Recorder(JsonlSink(tmp_path / "metrics.jsonl"))
    rng = np.random.default_rng(0)
    prompts = [
        Prompt(id=f"p{i}", text="", token_ids=rng.integers(2, 90, 12).astype(np.int32), row={}) for i in range(64)
    ]
    killed: list[int] = []

    async def score(groups):
        return [[float(len(rollout.token_ids) % 2) for rollout in group.rollouts] for group in groups]

    async def work() -> None:
        async with start_cluster(config, model) as cluster:
            victim = cluster.trainers[0]
            lease = victim.lease

            async def lease_then_kill() -> float:
                unleased_cpu_s = await lease()
                if len(killed) < 1:
                    await asyncio.sleep(0.1)
                    killed.append(victim.pid)
                    os.kill(victim.pid, signal.SIGKILL)
                return unleased_cpu_s

            victim.lease = lease_then_kill
            parts = Parts(
                members=cluster.members,
                learner=cluster.learner,
                sender=cluster.sender,
                prompts=iter(prompts),
                heldout=[],
                score=score,
                drafter=cluster.drafter,
            )
            await train(parts, config, recorder)
            facts = Provenance(
                policy="random", data="random tokens", start="random weights", num_tokens=0, seed=0, rl_steps=8
            )
            cluster.drafter.save(tmp_path / "trained", facts)

    asyncio.run(work())
    recorder.close()
    records = read_metrics(tmp_path / "metrics.jsonl")
    events = {event["what"]: event for event in records["event"]}
    assert killed and events["trainer_lost"]["engine"] == "engine-0"
    assert [len(record["length"]) for record in records["rollouts"]] == [16] * 8
    assert all(record["metrics"]["mismatch/k3"] < 1e-2 for record in records["step"])
    assert sum(record["metrics"]["draft/num_crashes"] for record in records["step"]) == 1
    assert records["step"][-1]["metrics"]["draft/tokens_trained"] > 256
    assert "drafter_published" in events or "drafter_refused" in events, "nothing that was trained was ever judged"
    assert not any(shared.glob("*/*")), "what the run kept in shared memory outlived it"
    assert (tmp_path / "trained" / "model.safetensors").is_file()
    assert read_provenance(tmp_path / "trained").num_tokens > 256
    assert len(read_evaluation(tmp_path / "trained").accepted_length) == 3
