"""Online drafter training: does the drafter follow the policy, at no cost, and release engines at once?

Two engines have a core each and the learner uses the first: the second engine's device may be leased while it works.

Drift. RL runs with a drafter trained on idle engines: the offline one, at a learning rate that moves the policy, once
per seed; and an untrained one, once, at the arena's learning rate. At the end, the engines get the run's drafter and
the offline drafter by turns, and sample the same prompts with the run's last policy. The draft length is fixed.

    online_over_frozen          accepted length of the trained drafter over the offline one; worst seed
    from_scratch_over_offline   of the untrained drafter after the run over the offline one
    idle_used                   seconds of training over seconds in which an engine without rollouts could be leased

Cost. Runs in which every batch of prompts comes twice, with devices leased and not leased. The first samples almost
greedily and learns almost nothing, so both steps of a pair do the same work. The others are the run of
docs/speculation.md, where learner and engines share the cores.

    step_time_ratio, makespan_ratio     leased over not leased, medians of pairs
    documented_step_ratio               time of all steps with leases over their twins' time, in the documented run

Recall. A device is leased, and after a random moment its engine gets a request for one token.

    recall_p99_ms               from the request to the token, in the driver
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np

from benchmarks.harness import ARENA, Record
from paceline.arena.prompts import arena_task
from paceline.arena.task import reward as arena_reward
from paceline.cluster.placement import Cluster, start_cluster
from paceline.config import Config, CorrectionConfig, load_config
from paceline.context import Context
from paceline.metrics import JsonlSink, Recorder, read_metrics
from paceline.orchestrator.drafter_training import OnlineDrafterTraining
from paceline.orchestrator.generate import generate_on_all
from paceline.orchestrator.journal import Journal
from paceline.orchestrator.loop import Parts, train
from paceline.orchestrator.online_drafter import OnlineDrafter
from paceline.orchestrator.rewards import Score, scorer
from paceline.orchestrator.task import Task
from paceline.sessions.draft import WarmStart, train_drafter
from paceline.sessions.train import load_tokenizer, with_drafter
from paceline.sessions.workloads import resolve_drafter, resolve_policy
from paceline.types import Learner, Prompt, RolloutRequest, Sample, Scores

SEEDS = (0, 1, 2)
STEPS, PAIRS, RECALLS = 40, 16, 210
DRAFT_LENGTH = 5
TURNS, PROMPTS_PER_TURN = 4, 64
DOCUMENTED = [
    "speculation.drafter.kind=eagle3",
    "speculation.drafter.path=arena:small/eagle3",
    "speculation.training.mode=idle",
    "eval.every=0",
]
LEASED = [
    *DOCUMENTED,
    "learner.cpus=1",
    f"speculation.max_draft_length={DRAFT_LENGTH}",
    "speculation.selector.kind=fixed",
    f"speculation.selector.draft_length={DRAFT_LENGTH}",
    "speculation.training.when=always",
]
STRONG = ["learner.learning_rate=3e-4", "rollout.max_tokens=384", "objective.drop_uniform_groups=false"]
"""Six times the best learning rate of the arena: the policy unlearns its task, responses would grow without end, and
most groups have equal rewards. They are kept, because only scored groups are handed over."""
SAME_WORK = [
    "rollout.temperature=0.01",
    "rollout.group_size=1",
    "rollout.prompts_per_step=128",
    "objective.drop_uniform_groups=false",
    "learner.learning_rate=1e-12",
]
Pair = tuple[Mapping[str, float], Mapping[str, float]]
"""Metrics of a step with leases and of its twin without."""


def run(overrides: Sequence[str], context: Context) -> Record:
    idle_used: list[float] = []
    online: list[list[float]] = []
    with TemporaryDirectory() as directory:
        scratch = Path(directory)
        for seed in SEEDS:
            strong = _config([*LEASED, *overrides, *STRONG, f"run.seed={seed}", f"run.steps={STEPS}"], context)
            online.append(_drift(strong, scratch / f"online-{seed}.jsonl", idle_used, context))
        untrained = f'speculation.drafter.path="{_untrained(scratch / "untrained", context)}"'
        from_scratch = _config([*LEASED, *overrides, untrained, f"run.steps={STEPS}"], context)
        learned = _drift(from_scratch, scratch / "from-scratch.jsonl", idle_used, context)
        config = _config([*LEASED, *overrides, *SAME_WORK, f"run.steps={2 * PAIRS}"], context)
        pairs, recall_s = asyncio.run(_pairs(config, scratch / "pairs.jsonl", RECALLS, context))
        documented: list[Pair] = []
        for seed in SEEDS:
            own = _config([*DOCUMENTED, *overrides, f"run.seed={seed}", f"run.steps={STEPS}"], context)
            documented += asyncio.run(_pairs(own, scratch / f"documented-{seed}.jsonl", 0, context))[0]
    record = Record(
        goals={
            "online_over_frozen": (">=", 1.2),
            "from_scratch_over_offline": (">=", 0.8),
            "step_time_ratio": ("<=", 1.01),
            "makespan_ratio": ("<=", 1.01),
            "documented_step_ratio": ("<=", 1.03),
            "recall_p99_ms": ("<=", 150.0),
            "idle_used": (">=", 0.8),
        },
        seeds=SEEDS,
        config=config.model_dump(mode="json"),
        details={"online_over_frozen_by_seed": online, "recall_median_ms": 1000 * median(recall_s)},
    )
    record.ratios(
        {
            "online_over_frozen": min(online, key=median),
            "from_scratch_over_offline": learned,
            "step_time_ratio": [on["time/step"] / off["time/step"] for on, off in pairs],
            "makespan_ratio": [on["rollout/makespan_s"] / off["rollout/makespan_s"] for on, off in pairs],
            "documented_step_ratio": [on["time/step"] / off["time/step"] for on, off in documented],
        }
    )
    # All pairs together, so that a rare slow step counts.
    record.figures["documented_step_ratio"] = sum(on["time/step"] for on, _ in documented) / sum(
        off["time/step"] for _, off in documented
    )
    record.add("recall_p99_ms", 1000 * float(np.quantile(recall_s, 0.99)), 1000 * (max(recall_s) - min(recall_s)))
    record.median("idle_used", idle_used)
    return record


def _config(settings: Sequence[str], context: Context) -> Config:
    return with_drafter(load_config(ARENA, settings), context)


def _untrained(out: Path, context: Context) -> Path:
    """Write a drafter after one optimizer step of `paceline draft train`'s warmup."""
    model_path = resolve_policy("arena:small", context)
    train_drafter(
        "eagle3",
        model_path,
        arena_task(load_tokenizer(model_path), seed=7, num_heldout=0).prompts,
        out,
        WarmStart(train_tokens=1, rollout_tokens=2_000, heldout_tokens=1_000, max_num_seqs=64),
        policy="arena:small",
        data="arena problems, seed 7",
        context=context,
    )
    return out


def _drift(config: Config, metrics: Path, idle_used: list[float], context: Context) -> list[float]:
    """Train once. Return accepted lengths of the run's drafter over the offline one, by turn."""
    turns = asyncio.run(_accepted_lengths(config, metrics, resolve_drafter("arena:small/eagle3", context), context))
    steps = [record["metrics"] for record in read_metrics(metrics)["step"]]
    idle_used.append(sum(step["draft/training_s"] for step in steps) / sum(step["draft/leasable_s"] for step in steps))
    own, left_alone = (median(lengths) for lengths in zip(*turns, strict=True))
    context.progress(f"{metrics.stem}: accepted length {own:.2f}, of the offline drafter {left_alone:.2f}")
    return [own / left_alone for own, left_alone in turns]


async def _accepted_lengths(
    config: Config, metrics: Path, offline: Path, context: Context
) -> list[tuple[float, float]]:
    async with _arena(config, context) as (cluster, task, score):
        recorder = Recorder(JsonlSink(metrics))
        await train(_parts(cluster, task.prompts, score), config, recorder)
        recorder.close()
        cluster.drafter.save(metrics.with_suffix(".drafter"))
        files = (metrics.with_suffix(".drafter") / "model.safetensors", offline / "model.safetensors")
        turns = []
        for turn in range(TURNS):
            prompts = list(islice(task.prompts, PROMPTS_PER_TURN))
            found = {
                file: await _accepted_length(cluster, file, prompts, config, 1_000 + turn)
                for file in (files if turn % 2 == 0 else reversed(files))
            }
            turns.append((found[files[0]], found[files[1]]))
    return turns


async def _accepted_length(
    cluster: Cluster, drafter: Path, prompts: Sequence[Prompt], config: Config, version: int
) -> float:
    receipts = await cluster.sender.send_drafter(drafter, version)
    assert all(receipt.ok for receipt in receipts), receipts
    length = config.rollout.max_tokens
    requests = [RolloutRequest.of(prompt, n, max_tokens=length, temperature=1.0) for n, prompt in enumerate(prompts)]
    rollouts = await generate_on_all(cluster.engines, requests)
    return 1 + sum(r.num_accepted for r in rollouts) / sum(r.num_verifications for r in rollouts)


async def _pairs(config: Config, metrics: Path, recalls: int, context: Context) -> tuple[list[Pair], list[float]]:
    """Train with devices leased in one step of every pair; then measure recalls."""
    recorder, recall_s = Recorder(JsonlSink(metrics)), []
    async with _arena(config, context) as (cluster, task, score):
        context.progress(f"{metrics.stem}: {config.run.steps} steps, devices leased in every second")
        parts = _parts(cluster, _twice(task.prompts, config.rollout.prompts_per_step), score)
        turns = _Turns(parts.drafter)
        learner = cast("Learner", _HoldingLearner(parts.learner, turns))
        await train(replace(parts, drafter=cast("OnlineDrafter", turns), learner=learner), config, recorder)
        if recalls:
            request = RolloutRequest.of(next(task.prompts), 0, max_tokens=1, temperature=1.0)
            recall_s = await _recalls(cluster, recorder, request, recalls)
    recorder.close()
    return pairs_of(read_metrics(metrics)["step"]), recall_s


def pairs_of(records: Sequence[Mapping[str, Any]]) -> list[Pair]:
    """Return steps with their twins, without the first two, which have nothing to train on yet."""
    steps = [record["metrics"] for record in records]
    return [(steps[i], steps[i + 1]) if trains(i) else (steps[i + 1], steps[i]) for i in range(2, len(steps) - 1, 2)]


def trains(step: int) -> bool:
    """Return whether devices are leased in this step: yes no, no yes, yes no, ..."""
    return step % 4 in (0, 3)


class _Turns:
    """The run's drafter training, paused in one step of every pair."""

    def __init__(self, training: OnlineDrafter) -> None:
        self._training = training
        self._step = -1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._training, name)

    @property
    def trains_now(self) -> bool:
        return trains(self._step)

    def open_phase(self) -> None:
        self._step += 1
        if self.trains_now:
            self._training.open_phase()


class _HoldingLearner:
    """The run's learner, which hands over no training data in the steps without drafter training."""

    def __init__(self, learner: Learner, turns: _Turns) -> None:
        self._learner = learner
        self._turns = turns

    def __getattr__(self, name: str) -> Any:
        return getattr(self._learner, name)

    async def score(
        self, samples: Sequence[Sample], *, correction: CorrectionConfig | None = None, hand_over: bool = False
    ) -> Scores:
        # Without a correction, so that every update costs the same.
        return await self._learner.score(samples, hand_over=hand_over and self._turns.trains_now)


def _twice(prompts: Iterator[Prompt], size: int) -> Iterator[Prompt]:
    """Yield each batch of prompts twice."""
    while batch := list(islice(prompts, size)):
        yield from batch
        yield from batch


async def _recalls(cluster: Cluster, recorder: Recorder, request: RolloutRequest, number: int) -> list[float]:
    """Measure seconds from a request for a leased device to its first token."""
    training = cluster.drafter
    assert isinstance(training, OnlineDrafterTraining)
    rng = np.random.default_rng(0)

    async def once(index: int) -> float:
        engine = cluster.engines[index % len(cluster.engines)]
        await training.leased(engine.name)
        await asyncio.sleep(rng.uniform(0.0, 0.1))
        began_s = time.monotonic()
        training.on_work(engine.name)
        await training.awake(engine.name)
        await engine.submit([request])
        await engine.collect()
        spent_s = time.monotonic() - began_s
        training.on_drained(engine.name)
        return spent_s

    async with training.running(Journal(recorder)):
        training.open_phase()
        times = [await once(index) for index in range(number)]
        await training.close_phase()
    return times


@asynccontextmanager
async def _arena(config: Config, context: Context) -> AsyncIterator[tuple[Cluster, Task, Score]]:
    model_path = resolve_policy(config.policy.model, context)
    tokenizer = load_tokenizer(model_path)
    task = arena_task(tokenizer, seed=config.run.seed, num_heldout=0)
    async with start_cluster(config, model_path) as cluster:
        yield cluster, task, scorer(arena_reward, tokenizer)


def _parts(cluster: Cluster, prompts: Iterator[Prompt], score: Score) -> Parts:
    return Parts(
        members=cluster.members,
        learner=cluster.learner,
        sender=cluster.sender,
        prompts=prompts,
        heldout=[],
        score=score,
        drafter=cluster.drafter,
    )
