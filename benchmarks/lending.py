"""What lending idle engines costs the run that docs/speculation.md shows: a part of `python -m benchmarks drafter`.

The arena as it is configured, with `speculation.training.mode=idle` and nothing else: learner and engines share the
cores. In one run devices are leased and not leased by turns (yes no, no yes, ...), and both steps of a pair have the
same prompts, so that policy, drafter, machine and length of responses are the same for both but for chance; two runs of
one seed would part ways. What a step with leases leaves behind for the next one would count for the wrong side, but
nothing should be: kills are counted, and a trainer that is not leased takes no time of a core (`lending_cost`).

    documented_kills            trainers that ended before their run did, whoever ended them, over all runs
    documented_step_ratio       time of all steps with leases over that of their twins without; its spread is the 95 %
                                interval of drawing pairs again
    documented_tokens_trained   by the run that trained least, of those whose engines were idle for 2 % of the time
    lending_cost                CPU time of trainers without a lease and time for which somebody waited for the end of
                                one, over the time of steps with leases; median of the runs

Three seeds; and once more beside a busy process on every core but one, whose figures are in the details: of them only
its kills count.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np

from paceline.arena.prompts import arena_task
from paceline.arena.task import reward as arena_reward
from paceline.cluster.placement import Cluster, start_cluster
from paceline.config import Config, CorrectionConfig, load_config
from paceline.context import Context
from paceline.measure import Goal, middle
from paceline.metrics import JsonlSink, Recorder, read_metrics
from paceline.orchestrator.loop import Parts, train
from paceline.orchestrator.online_drafter import OnlineDrafter
from paceline.orchestrator.rewards import Score, scorer
from paceline.orchestrator.task import Task
from paceline.sessions.train import load_tokenizer, with_drafter
from paceline.sessions.workloads import resolve_policy
from paceline.types import Learner, Prompt, Sample, Scores

DOCUMENTED = [
    "speculation.drafter.kind=eagle3",
    "speculation.drafter.path=arena:small/eagle3",
    "speculation.training.mode=idle",
    "eval.every=0",
]
SEEDS = (0, 1, 2)
_IDLE_SHARE = 0.02
"""Share of their time for which engines have to be idle before something has to be trained in it."""
_DRAWS = 4000

Pair = tuple[Mapping[str, float], Mapping[str, float]]
"""Metrics of a step with leases and of its twin without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lending:
    """The part's share of the result."""

    figures: dict[str, tuple[float, float]]
    """With their spread."""
    goals: dict[str, Goal]
    details: dict[str, Any]


def measure_documented(
    config_file: Path, overrides: Sequence[str], steps: int, scratch: Path, context: Context
) -> Lending:
    runs = [_run(config_file, overrides, steps, seed, scratch, context) for seed in SEEDS]
    with _busy_neighbour():
        disturbed = _run(config_file, overrides, steps, SEEDS[0], scratch, context)
    return summarise(runs, disturbed)


def _run(
    config_file: Path, overrides: Sequence[str], steps: int, seed: int, scratch: Path, context: Context
) -> list[dict[str, Any]]:
    """Records of all steps."""
    settings = [*DOCUMENTED, *overrides, f"run.seed={seed}", f"run.steps={steps}"]
    config = with_drafter(load_config(config_file, settings), context)
    context.progress(f"as documented, seed {seed}: {steps} steps")
    metrics = scratch / "documented.jsonl"
    metrics.unlink(missing_ok=True)

    async def work() -> None:
        recorder = Recorder(JsonlSink(metrics))
        async with start_arena(config, context) as (cluster, task, score):
            await train_by_turns(cluster, task, score, config, recorder)
        recorder.close()

    asyncio.run(work())
    return read_metrics(metrics)["step"]


@contextmanager
def _busy_neighbour() -> Iterator[None]:
    """A process on every core but one that never rests, in a session of its own as another user's is."""
    with ExitStack() as stack:
        for _ in range(max(1, len(os.sched_getaffinity(0)) - 1)):
            command = [sys.executable, "-c", "while True: pass"]
            process = subprocess.Popen(command, start_new_session=True)  # noqa: S603
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield


def summarise(runs: Sequence[Sequence[Mapping[str, Any]]], disturbed: Sequence[Mapping[str, Any]]) -> Lending:
    """The figures, from the records of every run's steps."""
    each, beside = [_figures(records) for records in runs], _figures(disturbed)
    worked = [run for run in each if run["idle_share"] >= _IDLE_SHARE]
    ratio, low, high = _ratio([pair for records in runs for pair in pairs_of(records)])
    tokens = [run["tokens_trained"] for run in worked] or [0.0]
    return Lending(
        figures={
            "documented_kills": (sum(run["kills"] for run in (*each, beside)), 0.0),
            "documented_step_ratio": (ratio, high - low),
            "documented_tokens_trained": (min(tokens), max(tokens) - min(tokens)),
            "lending_cost": middle([run["lending_cost"] for run in each]),
        },
        goals={
            "documented_kills": ("<=", 0.0),
            "documented_step_ratio": ("<=", 1.03),
            **({"documented_tokens_trained": (">=", 1.0)} if worked else {}),
            "lending_cost": ("<=", 0.01),
        },
        details={"step_ratio_interval": [low, high], "runs": each, "beside_a_busy_process": beside},
    )


def _figures(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    steps = [record["metrics"] for record in records]
    leased_s = sum(step["time/step"] for index, step in enumerate(steps) if trains(index))
    total = {
        key: sum(step[f"draft/{key}"] for step in steps)
        for key in ("num_crashes", "num_leases", "unleased_cpu_s", "stall_s", "idle_s", "training_s")
    }
    engine_s = sum(step["fleet/engines"] * step["time/step"] for index, step in enumerate(steps) if trains(index))
    return {
        "step_ratio": _ratio(pairs_of(records))[0],
        "kills": total["num_crashes"],
        "leases": total["num_leases"],
        "tokens_trained": steps[-1]["draft/tokens_trained"],
        "training_s": total["training_s"],
        "idle_share": total["idle_s"] / engine_s,
        "unleased_cpu_s": total["unleased_cpu_s"],
        "stall_s": total["stall_s"],
        "lending_cost": (total["unleased_cpu_s"] + total["stall_s"]) / leased_s,
    }


def _ratio(pairs: Sequence[Pair]) -> tuple[float, float, float]:
    """Time with leases over time without, of all pairs together, so that a rare slow step counts; with its interval."""
    times = np.array([[step["time/step"] for step in pair] for pair in pairs])
    drawn = times[np.random.default_rng(0).integers(len(times), size=(_DRAWS, len(times)))].sum(1)
    low, high = np.quantile(drawn[:, 0] / drawn[:, 1], [0.025, 0.975])
    return float(times[:, 0].sum() / times[:, 1].sum()), float(low), float(high)


def pairs_of(records: Sequence[Mapping[str, Any]]) -> list[Pair]:
    """Steps with their twins, except the first two, which have nothing to train on yet."""
    steps = [record["metrics"] for record in records]
    return [(steps[i], steps[i + 1]) if trains(i) else (steps[i + 1], steps[i]) for i in range(2, len(steps) - 1, 2)]


def trains(step: int) -> bool:
    """Whether devices are leased in this step: yes no, no yes, yes no, ..."""
    return step % 4 in (0, 3)


async def train_by_turns(cluster: Cluster, task: Task, score: Score, config: Config, recorder: Recorder) -> None:
    """One run in which every batch of prompts comes twice, with devices leased and not leased."""
    parts = parts_of(cluster, _twice(task.prompts, config.rollout.prompts_per_step), score)
    turns = _Turns(parts.drafter)
    learner = cast("Learner", _HoldingLearner(parts.learner, turns))
    await train(replace(parts, drafter=cast("OnlineDrafter", turns), learner=learner), config, recorder)


class _Turns:
    """The run's drafter training, held back in one step of every pair."""

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
    """The run's learner, which hands nothing over to drafter training in the steps without it."""

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
    """Each batch of prompts, and then the same once more."""
    while batch := list(islice(prompts, size)):
        yield from batch
        yield from batch


@asynccontextmanager
async def start_arena(config: Config, context: Context) -> AsyncIterator[tuple[Cluster, Task, Score]]:
    model_path = resolve_policy(config.policy.model, context)
    tokenizer = load_tokenizer(model_path)
    task = arena_task(tokenizer, seed=config.run.seed, num_heldout=0)
    async with start_cluster(config, model_path) as cluster:
        yield cluster, task, scorer(arena_reward, tokenizer)


def parts_of(cluster: Cluster, prompts: Iterator[Prompt], score: Score) -> Parts:
    return Parts(
        members=cluster.members,
        learner=cluster.learner,
        sender=cluster.sender,
        prompts=prompts,
        heldout=[],
        score=score,
        drafter=cluster.drafter,
    )
