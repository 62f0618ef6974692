"""A real run without a learned drafter: two engines draft from history, and go over to the drafter that is trained
beside them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

from contexts import arena_config
from paceline import assets
from paceline.arena.prompts import arena_task
from paceline.cluster.placement import Cluster, start_cluster
from paceline.drafters.switch import SwitchDecision
from paceline.metrics import JsonlSink, Recorder, read_metrics
from paceline.orchestrator.drafter_switch import DrafterSwitch
from paceline.orchestrator.drafter_training import OnlineDrafterTraining
from paceline.orchestrator.loop import Parts, train
from paceline.sessions.train import load_tokenizer

STEPS = 7
SETTINGS = [
    f"run.steps={STEPS}",
    "rollout.prompts_per_step=4",
    "rollout.group_size=4",
    "rollout.max_tokens=160",
    "rollout.engine.max_model_len=320",
    "rollout.engine.kv_cache_gb=0.25",
    "rollout.engine.max_num_seqs=16",
    "eval.every=0",
    "speculation.drafter.kind=eagle3",
    "speculation.drafter.init=random",
    "speculation.max_draft_length=3",
    # Leases of a given length after every update: how long engines are idle depends on what else the machine does.
    "speculation.training.mode=inline",
    "speculation.training.inline_s=2",
    "speculation.training.tokens_per_step=256",
    "speculation.training.round_tokens=256",
    "speculation.training.when=always",
    "speculation.training.buffer.heldout_share=0.4",
]


def plant(cluster: Cluster, shared: Path, restarts: list[bool]) -> None:
    """Let every published drafter pay for a switch, and take the drafter's checkpoint away from the first one: no
    engine starts. The run would not try again; here it does."""
    switch = cast("OnlineDrafterTraining", cluster.drafter)._switch
    assert isinstance(switch, DrafterSwitch)
    monitor, draft_with = switch._monitor, cluster.draft_with
    monitor.decide = lambda **_: SwitchDecision(switch=(monitor.promised or 0.0) > 1.0, why="planted")

    async def watched(*, learned: bool) -> None:
        restarts.append(learned)
        if len(restarts) > 1:
            await draft_with(learned=learned)
            switch.given_up = False
            return
        (drafter,) = shared.glob("*/*/drafter")
        hidden = drafter.rename(drafter.with_name("hidden"))
        try:
            await draft_with(learned=learned)
        finally:
            hidden.rename(drafter)

    cluster.draft_with = watched


def test_engines_go_over_from_history_to_the_drafter_that_the_run_trains(tmp_path: Path) -> None:
    """The first try fails in every engine, and they draft from history again; the second works. Every rollout comes, on
    a policy that both ends agree on."""
    shared, restarts = tmp_path / "shared", list[bool]()
    config = arena_config([*SETTINGS, f'speculation.training.buffer.directory="{shared}"'])
    recorder = Recorder(JsonlSink(tmp_path / "metrics.jsonl"))
    model = assets.policy("tiny")
    task = arena_task(load_tokenizer(model), seed=0, num_heldout=0)

    async def score(groups):
        return [[float(rollout.index % 2) for rollout in group.rollouts] for group in groups]

    async def work() -> None:
        async with start_cluster(config, model) as cluster:
            plant(cluster, shared, restarts)
            parts = Parts(
                members=cluster.members,
                learner=cluster.learner,
                sender=cluster.sender,
                prompts=task.prompts,
                heldout=[],
                score=score,
                drafter=cluster.drafter,
                healer=cluster.healer,
            )
            await train(parts, config, recorder)
            cluster.drafter.save(tmp_path / "trained")

    asyncio.run(work())
    recorder.close()
    records = read_metrics(tmp_path / "metrics.jsonl")
    steps = [record["metrics"] for record in records["step"]]
    events = {event["what"]: event for event in records["event"]}
    assert restarts == [True, False, True]
    assert "no config.json" in events["drafter_training_failed"]["why"]
    assert [len(record["length"]) for record in records["rollouts"]] == [16] * STEPS
    assert {step["fleet/engines"] for step in steps} == {2} and {step["sync/failed"] for step in steps} == {0}
    assert all(step["mismatch/k3"] < 1e-2 for step in steps), "they sample from another policy than the learner has"
    on_history = int(events["drafter_switched"]["step"])
    assert [step["draft/learned"] for step in steps] == [0.0] * (on_history - 1) + [1.0] * (STEPS - on_history + 1)
    # The engines say themselves which drafter they have: counted in the step before the switch, and after it.
    assert ["history/failures" in step for step in steps] == [True] * on_history + [False] * (STEPS - on_history)
    assert on_history < STEPS and steps[-1]["rollout/num_drafted"] > 0
    assert steps[-1]["draft/published_round"] > 0 and "drafter_push_failed" not in events
    assert (tmp_path / "trained" / "model.safetensors").is_file()
