"""VllmEngine over the real vLLM: complete groups, honest log-probabilities, deadlines that hold, no process left
behind."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.config import EngineConfig
from paceline.rollout.engine import VllmEngine
from paceline.rollout.pulse import STOPPED_S, vitals_of
from paceline.types import EngineLostError, GroupId, Rollout, RolloutId, RolloutRequest
from random_policy import make_policy

TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def engine(
    runner: asyncio.Runner, policy_path: Path, engine_config: EngineConfig, one_cpu: list[int]
) -> Iterator[VllmEngine]:
    engine = runner.run(VllmEngine.start("engine-0", policy_path, engine_config, seed=0, cpus=one_cpu))
    yield engine
    runner.run(engine.close())


def requests(*, groups: int, size: int, max_tokens: int = 24, seed: int | None = None) -> list[RolloutRequest]:
    return [
        RolloutRequest(
            group_id=GroupId(group),
            index=index,
            prompt_ids=np.arange(10 + group, 20 + 2 * group, dtype=np.int32),
            max_tokens=max_tokens,
            temperature=TEMPERATURE,
            seed=None if seed is None else seed + 100 * group + index,
        )
        for group in range(groups)
        for index in range(size)
    ]


async def collect_all(engine: VllmEngine, number: int) -> dict[RolloutId, Rollout]:
    rollouts: list[Rollout] = []
    while len(rollouts) < number:
        rollouts += await engine.collect()
    assert len(rollouts) == number
    return {rollout.id: rollout for rollout in rollouts}


async def generate(engine: VllmEngine, wanted: Sequence[RolloutRequest]) -> dict[RolloutId, Rollout]:
    await engine.submit(wanted)
    return await collect_all(engine, len(wanted))


def reference_logp(policy_path: Path, rollout: Rollout, temperature: float) -> np.ndarray:
    """Teacher-forced log-softmax of the reference implementation for the tokens of a rollout."""
    model = AutoModelForCausalLM.from_pretrained(policy_path, dtype=torch.float32)
    tokens = torch.from_numpy(np.concatenate([rollout.prompt_ids, rollout.token_ids]).astype(np.int64))
    with torch.no_grad():
        logits_TV = model(tokens[None]).logits[0]
    logp_TV = torch.log_softmax(logits_TV / temperature, dim=-1)
    start = len(rollout.prompt_ids)
    return logp_TV[start - 1 : -1].gather(1, tokens[start:, None])[:, 0].numpy()


def test_groups_come_back_complete(runner: asyncio.Runner, engine: VllmEngine) -> None:
    """A rollout that is lost, doubled or given the prompt of another group spoils the advantages of its group."""
    wanted = requests(groups=3, size=4)
    rollouts = runner.run(generate(engine, wanted))
    assert set(rollouts) == {request.id for request in wanted}
    for request in wanted:
        rollout = rollouts[request.id]
        assert rollout.prompt_ids.tolist() == request.prompt_ids.tolist()
        assert len(rollout.logp) == len(rollout.token_ids)
        ended = rollout.token_ids[-1] == 1
        assert rollout.finish_reason == ("stop" if ended else "length")
        assert 1 not in rollout.token_ids[:-1]
        assert ended or len(rollout.token_ids) == request.max_tokens
        assert rollout.engine == "engine-0"
        assert rollout.started_s < rollout.finished_s <= time.monotonic()


def test_logp_is_of_the_distribution_that_was_sampled(
    runner: asyncio.Runner, engine: VllmEngine, policy_path: Path
) -> None:
    """vLLM's default log-probabilities leave out the temperature: importance ratios against them are biased."""
    rollouts = runner.run(generate(engine, requests(groups=2, size=2)))
    for rollout in rollouts.values():
        np.testing.assert_allclose(rollout.logp, reference_logp(policy_path, rollout, TEMPERATURE), atol=2e-4)
    longest = max(rollouts.values(), key=lambda rollout: len(rollout.token_ids))
    assert np.abs(longest.logp - reference_logp(policy_path, longest, 1.0)).max() > 0.05


def test_seed_fixes_the_rollout(runner: asyncio.Runner, engine: VllmEngine) -> None:
    """Evaluation must not move because of luck; siblings of a group must differ."""
    first = runner.run(generate(engine, requests(groups=2, size=4, seed=7)))
    second = runner.run(generate(engine, requests(groups=2, size=4, seed=7)))
    assert {key: rollout.token_ids.tolist() for key, rollout in first.items()} == {
        key: rollout.token_ids.tolist() for key, rollout in second.items()
    }
    assert len({tuple(rollout.token_ids.tolist()) for rollout in first.values()}) > 4


def test_seeded_prompts_beyond_one_step_do_not_kill_the_engine(runner: asyncio.Runner, engine: VllmEngine) -> None:
    """vLLM's CPU worker dies when the prefill of a seeded request is cut in two; 12 times 200 tokens do not fit into a
    step."""
    wanted = [
        RolloutRequest(
            group_id=GroupId(i),
            index=0,
            prompt_ids=np.random.default_rng(i).integers(2, 96, 200).astype(np.int32),
            max_tokens=2,
            temperature=1.0,
            seed=i,
        )
        for i in range(12)
    ]
    assert len(runner.run(generate(engine, wanted))) == 12


def test_metrics_count_tokens(runner: asyncio.Runner, engine: VllmEngine) -> None:
    """The progress deadline is built on this count."""
    before = runner.run(engine.metrics())["engine/generated_tokens"]
    rollouts = runner.run(generate(engine, requests(groups=1, size=4)))
    metrics = runner.run(engine.metrics())
    assert metrics["engine/generated_tokens"] - before == sum(len(rollout.token_ids) for rollout in rollouts.values())
    assert metrics["engine/running_requests"] == 0


def test_prompt_without_room_is_refused(runner: asyncio.Runner, engine: VllmEngine) -> None:
    """vLLM would refuse it after half of the requests were queued."""
    request = RolloutRequest(
        group_id=GroupId(0), index=0, prompt_ids=np.full(256, 5, np.int32), max_tokens=4, temperature=1.0
    )
    with pytest.raises(ValueError, match="prompt_ids: got 256 tokens"):
        runner.run(engine.submit([*requests(groups=1, size=1), request]))
    assert runner.run(engine.metrics())["engine/running_requests"] == 0


async def pause_in_the_middle(engine: VllmEngine, wanted: Sequence[RolloutRequest]) -> float:
    """Submit, wait for the first tokens, pause; returns the number of tokens so far."""
    before = (await engine.metrics())["engine/generated_tokens"]
    await engine.submit(wanted)
    while (await engine.metrics())["engine/generated_tokens"] - before < len(wanted):
        await asyncio.sleep(0)
    await engine.pause()
    return (await engine.metrics())["engine/generated_tokens"]


def test_paused_engine_stands_still_and_goes_on(runner: asyncio.Runner, engine: VllmEngine) -> None:
    """Weights written while the engine steps would be sampled from half-written."""
    wanted = requests(groups=2, size=8, max_tokens=200)

    async def scenario() -> tuple[float, float, dict[RolloutId, Rollout]]:
        paused_at = await pause_in_the_middle(engine, wanted)
        # EngineCore answers calls between steps: had it gone on stepping, these would have let it.
        for _ in range(20):
            await engine.rpc("paceline_processes")
        still_at = (await engine.metrics())["engine/generated_tokens"]
        await engine.resume()
        return paused_at, still_at, await collect_all(engine, len(wanted))

    paused_at, still_at, rollouts = runner.run(scenario())
    assert still_at == paused_at
    assert set(rollouts) == {request.id for request in wanted}


def test_aborted_rollouts_end_and_the_others_and_the_engine_go_on(runner: asyncio.Runner, engine: VllmEngine) -> None:
    """vLLM answers an abort like any other end, and that is how an engine that is torn down looks too."""
    wanted = requests(groups=2, size=8, max_tokens=200)
    aborted = [request.id for request in wanted if request.group_id == wanted[0].group_id]

    async def scenario() -> tuple[dict[RolloutId, Rollout], float, dict[RolloutId, Rollout]]:
        await pause_in_the_middle(engine, wanted)
        early = {rollout.id: rollout for rollout in engine._finished}
        await engine.abort(aborted)
        await engine.abort([RolloutId(GroupId(10**6), 0)])  # nothing that it knows
        await engine.resume()
        rest = await collect_all(engine, len(wanted) - len([key for key in aborted if key not in early]))
        running = (await engine.metrics())["engine/running_requests"]
        return rest, running, await generate(engine, wanted)

    rest, running, again = runner.run(scenario())
    assert {request.id for request in wanted if request.id not in aborted} <= set(rest)
    assert running == 0
    assert set(again) == {request.id for request in wanted}


def test_rollout_across_a_sync_knows_both_versions(
    runner: asyncio.Runner, engine: VllmEngine, policy_path: Path
) -> None:
    """New weights drop every cached prefix, also those that requests in flight hold; the requests must survive that."""
    wanted = requests(groups=2, size=8, max_tokens=200)

    async def scenario() -> tuple[dict[RolloutId, Rollout], dict[RolloutId, Rollout]]:
        await pause_in_the_middle(engine, wanted)
        await engine.on_new_weights(7)
        await engine.resume()
        return await collect_all(engine, len(wanted)), await generate(engine, requests(groups=1, size=1))

    across, after = runner.run(scenario())
    versions = {(rollout.policy_version, rollout.version_spans[-1][0]) for rollout in across.values()}
    assert versions <= {(0, 0), (0, 7)}
    assert (0, 7) in versions
    for rollout in across.values():
        assert sum(num for _, num in rollout.version_spans) == len(rollout.token_ids)
        assert all(num > 0 for _, num in rollout.version_spans) and len(rollout.version_spans) <= 2
    assert [(rollout.policy_version, rollout.version_spans[-1][0]) for rollout in after.values()] == [(7, 7)]
    assert engine.policy_version == 7
    for (
        rollout
    ) in across.values():  # the weights are the same in truth, so a cache computed anew must give the same values
        np.testing.assert_allclose(rollout.logp, reference_logp(policy_path, rollout, TEMPERATURE), atol=2e-4)


def test_engine_of_one_core_stays_on_it_and_rests_at_once(
    runner: asyncio.Runner, engine: VllmEngine, one_cpu: list[int]
) -> None:
    """vLLM's CPU workers have a process of their own, and both look for messages for a second after the last one: on
    cores that the learner needs by then."""
    runner.run(generate(engine, requests(groups=1, size=2)))

    def used_s() -> float:
        return sum(vitals.used_s for vitals in vitals_of(engine._processes).values())

    before_s, window_s = used_s(), 0.6
    time.sleep(window_s)  # what it uses meanwhile is measured
    assert used_s() - before_s < window_s / 4
    assert [process.cpu_affinity() for process in engine._processes] == [one_cpu]


def test_sleeping_engine_wakes_and_generates(runner: asyncio.Runner, engine: VllmEngine) -> None:
    """A lease of an idle engine must not cost the engine."""

    async def scenario() -> dict[RolloutId, Rollout]:
        await engine.sleep()
        await engine.wake()
        return await generate(engine, requests(groups=1, size=2))

    assert len(runner.run(scenario())) == 2


def test_frozen_engine_is_lost_and_can_be_ended(runner: asyncio.Runner, engine: VllmEngine) -> None:
    """vLLM's own health check passes on a stopped EngineCore, and a trainer would wait for ever.

    The shared engine does not survive this: it is the last test that uses it.
    """
    processes = list(engine._processes)
    core = next(process for process in processes if process.ppid() == psutil.Process().pid)
    engine.config = engine.config.model_copy(update={"deadline_s": 2.0})

    async def scenario() -> None:
        await engine.submit(requests(groups=2, size=4, max_tokens=200))
        core.send_signal(signal.SIGSTOP)
        while True:
            await engine.collect()

    started_s = time.monotonic()
    with pytest.raises(EngineLostError, match="no token for"):
        runner.run(scenario())
    assert time.monotonic() - started_s < 30
    with pytest.raises(EngineLostError):
        runner.run(engine.pause())
    runner.run(engine.close())
    assert not any(process.is_running() for process in processes)


def test_dead_engine_core_ends_the_wait(
    runner: asyncio.Runner, policy_path: Path, engine_config: EngineConfig, one_cpu: list[int]
) -> None:
    """An engine whose process dies must raise, not look idle."""

    async def scenario() -> list[psutil.Process]:
        engine = await VllmEngine.start("engine-1", policy_path, engine_config, seed=0, cpus=one_cpu)
        processes = list(engine._processes)
        await engine.submit(requests(groups=2, size=4, max_tokens=200))
        next(process for process in processes if process.ppid() == psutil.Process().pid).kill()
        with pytest.raises(EngineLostError):
            while True:
                await engine.collect()
        with pytest.raises(EngineLostError):
            await engine.submit(requests(groups=1, size=1))
        await engine.close()
        return processes

    assert not any(process.is_running() for process in runner.run(scenario()))


def test_frozen_engine_without_work_is_found_by_its_heartbeat(
    runner: asyncio.Runner, policy_path: Path, engine_config: EngineConfig, one_cpu: list[int]
) -> None:
    """It owes nobody a token, so only what it is asked for its life's sake can tell."""

    async def scenario() -> float:
        engine = await VllmEngine.start("engine-1", policy_path, engine_config, seed=0, cpus=one_cpu)
        await engine.heartbeat()
        while engine._ping is not None:  # it answers
            await asyncio.sleep(0.05)
        core = next(process for process in engine._processes if process.ppid() == psutil.Process().pid)
        core.send_signal(signal.SIGSTOP)
        stopped_s = time.monotonic()
        with pytest.raises(EngineLostError, match="frozen"):
            while True:
                await engine.heartbeat()
                await asyncio.sleep(1)
        found_s = time.monotonic() - stopped_s
        await engine.close()
        return found_s

    assert STOPPED_S < runner.run(scenario()) < 3 * 15


def test_no_process_outlives_its_owner(tmp_path: Path, two_cpus: list[int]) -> None:
    """vLLM's processes do not notice that their owner was killed; orphans would hold memory and cores for ever.

    The owner first closes an engine cleanly. Its policy is narrow, in bfloat16, and its first prompt is short: without
    AMX initialized in vLLM's processes, that engine dies of an illegal instruction. Nor does its end look like a crash.
    """
    policy = make_policy(tmp_path / "narrow", hidden_size=256)
    script = Path(__file__).with_name("owner.py")
    owner = subprocess.Popen(
        [sys.executable, str(script), str(policy), *map(str, two_cpus)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert owner.stdout is not None
    lines: list[str] = []
    for line in owner.stdout:
        lines.append(line)
        if line.startswith("{"):
            break
    said = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else None
    orphans = [psutil.Process(pid) for pid in said["orphans"]] if said else []
    owner.kill()
    owner.wait()
    assert said is not None, "the owner died on its own"
    assert not any("Traceback" in line for line in lines), "".join(lines)
    assert said["num_tokens"] >= 1
    assert said["after_close"] == []
    assert len(orphans) == 4  # an EngineCore with its worker, and one with two workers
    _, alive = psutil.wait_procs(orphans, timeout=10)
    for process in alive:
        process.kill()
    assert alive == []
