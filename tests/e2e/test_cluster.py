"""Real Ray, real vLLM, a real learner: an engine or learner that dies is replaced, and nothing survives the driver's
death."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from ipaddress import ip_address
from itertools import count, islice
from pathlib import Path

import numpy as np
import psutil
import pytest

from contexts import arena_config
from paceline.cluster import layout
from paceline.cluster.placement import start_cluster
from paceline.learner import guard
from paceline.metrics import JsonlSink, Recorder, read_metrics
from paceline.orchestrator.groups import Sampling
from paceline.orchestrator.loop import Parts, train
from paceline.rollout.stepped import Order, stepped_engine
from paceline.types import GroupId, Prompt, RolloutId, RolloutRequest
from random_policy import make_policy

SMALL = [
    "run.steps=3",
    "rollout.prompts_per_step=8",
    "rollout.group_size=4",
    "rollout.max_tokens=200",
    "rollout.engine.max_model_len=256",
    "rollout.engine.kv_cache_gb=0.25",
    "rollout.engine.max_num_seqs=16",
    "learner.learning_rate=1e-3",
    "eval.every=0",
]
EXACT = ["rollout.engine.dtype=float32"]
"""Rows of a batch round alike, up to ties that are rarer than these batches are long."""


@pytest.fixture(scope="module")
def plain_tokens(tmp_path_factory) -> dict[RolloutId, list[int]]:
    """The first batch as one engine without speculation and without a fault draws it."""
    model = make_policy(tmp_path_factory.mktemp("plain") / "model")
    config = arena_config([*SMALL, *EXACT])
    sampling = Sampling.to_train(config)
    requests = [
        RolloutRequest(
            group_id=GroupId(place),
            index=index,
            prompt_ids=prompt.token_ids,
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            seed=sampling.seed_of(place, index),
        )
        for place, prompt in enumerate(islice(random_prompts(), config.rollout.prompts_per_step))
        for index in range(sampling.group_size)
    ]
    with stepped_engine(model, None, seed=0, config=config.rollout.engine) as engine:
        batch = engine.run(Order(requests=requests))
    return {request.id: tokens for request, tokens in zip(requests, batch.token_ids, strict=True)}


def gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def sockets_of(processes: list[psutil.Process]) -> set[str]:
    return {str(c.laddr) for process in processes for c in process.net_connections("unix") if c.laddr}


def kill_learner() -> psutil.Process:
    children = psutil.Process().children(recursive=True)
    # Ray names a process by its actor.
    (learner,) = [child for child in children if not gone(child) and "LearnerActor" in " ".join(child.cmdline())]
    learner.kill()
    return learner


def random_prompts() -> Iterator[Prompt]:
    for i in count():
        token_ids = np.random.default_rng(i).integers(2, 90, 12).astype(np.int32)
        yield Prompt(id=f"p{i}", text="", token_ids=token_ids, row={})


def wait_until(condition, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return condition()


async def stream_on(cluster, metrics) -> None:
    """Train asynchronously with the same processes: syncs come in the middle of rollouts, which know the version of
    every token, nothing is too old, and what is aborted is sampled again and counts once."""
    config = arena_config([*SMALL, "run.steps=5", "run.max_age=1", "run.too_old=abort", "guard.mode=act"])
    recorder, seen = Recorder(JsonlSink(metrics)), []

    async def score(groups):
        seen.extend(rollout for group in groups for rollout in group.rollouts)
        return [[float(len(rollout.token_ids) % 2) for rollout in group.rollouts] for group in groups]

    parts = Parts(
        members=cluster.members,
        learner=cluster.learner,
        sender=cluster.sender,
        prompts=random_prompts(),
        heldout=[],
        score=score,
    )
    await train(parts, config, recorder)
    recorder.close()
    steps = [record["metrics"] for record in read_metrics(metrics)["step"]]
    assert sorted((rollout.group_id.number, rollout.index) for rollout in seen) == [
        (group, index) for group in range(40) for index in range(4)
    ]
    assert all(sum(num for _, num in rollout.version_spans) == len(rollout.token_ids) for rollout in seen)
    assert any(len(rollout.version_spans) > 1 for rollout in seen), "no sync came in the middle of a rollout"
    assert {step["rollout/max_age_exceeded"] for step in steps} == {0}
    assert max(step["rollout/age_max"] for step in steps) == 1
    # Older tokens are an update away from the learner; those of the present version are not.
    assert all(step["mismatch/k3"] < 1e-2 for step in steps if "mismatch/k3" in step)
    assert max(step["guard/level"] for step in steps) <= 1


def check_recovery(records) -> None:
    """One engine healed before step 2, one learner in step 3."""
    (back,) = [event for event in records["event"] if event["what"] == "engine_healed"]
    assert back["engine"] == "engine-0#2"
    assert [record["metrics"]["fleet/engines"] for record in records["step"]] == [1, 2, 2]
    assert [record["metrics"]["engine/lost"] for record in records["step"]] == [1, 0, 0]
    assert [record["metrics"]["engine/restarted"] for record in records["step"]] == [0, 1, 0]
    last = records["rollouts"][-1]
    assert {last["engines"][index] for index in last["engine"]} == {"engine-0#2", "engine-1"}
    assert [event["calls_repeated"] for event in records["event"] if event["what"] == "learner_healed"] == [2]
    assert [record["metrics"]["learner/restarted"] for record in records["step"]] == [0, 0, 1]
    by_engine = records["mismatch"][-1]["engines"]
    assert by_engine["engine-0#2"] < 1e-2, "it samples from another policy than the learner has"
    assert [record["metrics"]["sync/version"] for record in records["step"]] == [1, 2, 3]
    # A policy that did not arrive would show here: every update moves log-probabilities by far more.
    assert all(record["metrics"]["mismatch/k3"] < 1e-2 for record in records["step"])
    assert all(record["metrics"]["rollout/num_drafted"] > 0 for record in records["step"])


@pytest.mark.parametrize(("transport", "killed"), [("shared_memory", "actor"), ("distributed", "EngineCore")])
def test_killed_engine_and_learner_cost_no_group_and_no_process_and_come_back(
    tmp_path, monkeypatch, plain_tokens, transport, killed
):
    """SIGKILL of one of two engines in mid-rollout: every group still arrives once, on a policy that learner and engine
    agree on, and another engine in its place samples a later batch from that policy.

    SIGKILL of the learner before the last step: a new one has the policy that the engines have, by the same updates.

    On the CPU the distributed transport runs over gloo; the process group is made anew without the engine that is gone.

    The engines speculate, so that a fault which only drafts bring out has the whole loop to show in. Verification is
    coupled: rollouts that were lost are generated again with the tokens that an undisturbed engine draws."""
    monkeypatch.setattr(layout, "weight_transport", lambda kind: transport)
    model = make_policy(tmp_path / "model")
    coupled = ["speculation.drafter.kind=history", "speculation.max_draft_length=3", "speculation.verification=coupled"]
    config = arena_config([*SMALL, *EXACT, *coupled])
    first: dict[RolloutId, list[int]] = {}
    recorder = Recorder(JsonlSink(tmp_path / "metrics.jsonl"))
    seen: list[RolloutId] = []
    orphans: list[psutil.Process] = []
    healed = asyncio.Event()

    async def score(groups):
        seen.extend(rollout.id for group in groups for rollout in group.rollouts)
        for group in groups:
            first.update((one.id, one.token_ids.tolist()) for one in group.rollouts if one.id in plain_tokens)
        if len(seen) == 2 * 8 * 4:
            await asyncio.wait_for(healed.wait(), 600)  # a start takes longer than these small steps
        if len(seen) == 3 * 8 * 4:
            orphans.append(kill_learner())
        return [[float(len(rollout.token_ids) % 2) for rollout in group.rollouts] for group in groups]

    async def work():
        async with start_cluster(config, model) as cluster:
            cluster.members.on_joined(lambda engine: healed.set())
            cluster.learner.heal(recorder.event)
            victim = cluster.engines[0]
            taken = victim.collect

            async def collect_then_die():
                rollouts = await taken()
                if not orphans:  # it has delivered something and has more to deliver
                    process = psutil.Process(victim.pid)
                    orphans.extend([process, *process.children(recursive=True)])
                    for doomed in orphans[:1] if killed == "actor" else orphans[1:]:
                        os.kill(doomed.pid, signal.SIGKILL)
                return rollouts

            victim.collect = collect_then_die
            parts = Parts(
                members=cluster.members,
                learner=cluster.learner,
                sender=cluster.sender,
                prompts=random_prompts(),
                heldout=[],
                score=score,
                healer=cluster.healer,
            )
            await train(parts, config, recorder, save_to=str(tmp_path / "policy"))
            if transport == "distributed":  # once: it starts nothing
                await stream_on(cluster, tmp_path / "streamed.jsonl")
            assert wait_until(lambda: all(gone(process) for process in orphans), 10), "vLLM outlived its actor"

    asyncio.run(work())
    recorder.close()
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert len(seen) == len(set(seen)) == 3 * 8 * 4
    (lost,) = [event for event in records["event"] if event["what"] == "engine_lost"]
    assert lost["engine"] == "engine-0"
    assert lost["redispatched"] > 0
    assert first == plain_tokens
    check_recovery(records)
    assert (tmp_path / "policy" / "step-3" / "model.safetensors").is_file()
    assert undocumented(records["step"][-1]["metrics"]) == []


def undocumented(keys: Iterable[str]) -> list[str]:
    """Metrics that docs/metrics.md does not tell about, where names of one kind share a row."""
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    number = re.compile(r"(?<=_[pk])[0-9.]+$")
    told = {number.sub("", name) for name in re.findall(r"`([^`]+)`", page)}
    names = {key: number.sub("", key) for key in keys if not key.startswith("time/")}
    return [key for key, name in names.items() if not {name, name.partition("/")[2]} & told]


def test_engines_started_again_by_the_guard_go_on_with_the_policy(tmp_path, monkeypatch):
    """Limits that any mismatch exceeds: both engines are started again after the first batch, take the push and sample
    the next, and no process of the first two is left."""
    model = make_policy(tmp_path / "model")
    monkeypatch.setattr(guard, "LIMITS", {rung: rung * 1e-12 for rung in guard.LIMITS})
    monkeypatch.setattr(guard, "MAX_PUSHES", 9)
    config = arena_config([*SMALL, "run.steps=2", "guard.mode=act"])
    recorder = Recorder(JsonlSink(tmp_path / "metrics.jsonl"))
    before: list[psutil.Process] = []

    async def score(groups):
        return [[float(rollout.index % 2) for rollout in group.rollouts] for group in groups]

    async def work():
        async with start_cluster(config, model) as cluster:

            async def start_again(raised: bool) -> None:
                children = [
                    child for engine in cluster.engines for child in psutil.Process(engine.pid).children(recursive=True)
                ]
                # Python's own tracker belongs to the actor, which lives on.
                before.extend(child for child in children if "resource_tracker" not in " ".join(child.cmdline()))
                await cluster.raise_precision(raised)

            parts = Parts(
                members=cluster.members,
                learner=cluster.learner,
                sender=cluster.sender,
                prompts=(
                    Prompt(id=f"p{i}", text="", token_ids=np.arange(2, 14, dtype=np.int32), row={}) for i in range(64)
                ),
                heldout=[],
                score=score,
                healer=cluster.healer,
                raise_precision=start_again,
            )
            await train(parts, config, recorder)
            assert before and wait_until(lambda: all(gone(process) for process in before), 10)

    asyncio.run(work())
    recorder.close()
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [record["metrics"]["guard/level"] for record in records["step"]] == [3, 4]
    assert [record["metrics"]["sync/failed"] for record in records["step"]] == [0, 0]
    assert [record["metrics"]["fleet/engines"] for record in records["step"]] == [2, 2]
    assert records["step"][1]["metrics"]["mismatch/k3"] < 1e-2, "they sample from the policy that was pushed"
    assert len(records["rollouts"][1]["length"]) == 32


def test_nothing_outlives_ctrl_c(tmp_path):
    """Orphaned engines hold memory until somebody notices; 10 s after the driver's end none may be left. While they
    live, nobody outside the machine and no other user may reach them. SIGTERM and SIGKILL: test_resume.py."""
    command = [sys.executable, "-m", "paceline.cli", "train", "configs/arena.toml", "policy.model=arena:tiny", *SMALL]
    command += [
        "run.steps=100",
        "learner.world_size=2",
        "rollout.max_tokens=600",
        "rollout.engine.max_model_len=768",
        f'run.directory="{tmp_path}"',
    ]
    log = (tmp_path / "log").open("w")
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a background shell has tests, and what they start, ignore it
    driver = subprocess.Popen(command, stdout=log, stderr=log, cwd=Path(__file__).parents[2])
    metrics = tmp_path / "arena" / "metrics.jsonl"

    def generating() -> bool:
        lines = metrics.read_text().splitlines() if metrics.is_file() else []
        return driver.poll() is not None or any('"generation"' in line for line in lines)

    assert wait_until(generating, 420)  # the first of these tests may have to build the policy
    assert driver.poll() is None, (tmp_path / "log").read_text()[-3000:]
    family = psutil.Process(driver.pid).children(recursive=True)
    # vLLM spawns its engines. It gives them a title too, but whether that can be set hangs on how their environment
    # lies in memory.
    commands = [" ".join(process.cmdline()) for process in family]
    assert any("EngineCore" in command or "spawn_main" in command for command in commands), commands
    listening = {c.laddr.ip for process in family for c in process.net_connections("inet") if c.status == "LISTEN"}
    assert listening and all(ip_address(ip.removeprefix("::ffff:")).is_loopback for ip in listening), listening
    (scratch,) = {Path(c).parents[3] for c in sockets_of(family) if c.endswith("/plasma_store")}
    assert scratch.stat().st_mode & 0o777 == 0o700
    driver.send_signal(signal.SIGINT)
    assert wait_until(lambda: driver.poll() is not None and all(gone(process) for process in family), 10), [
        (process.pid, process.name()) for process in family if not gone(process)
    ]
    assert driver.returncode == 130
    assert "Traceback" not in (tmp_path / "log").read_text()
    assert wait_until(lambda: not scratch.exists(), 10)
    assert json.loads(metrics.read_text().splitlines()[0])["kind"] == "run"
