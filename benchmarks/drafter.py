"""Does the drafter follow the policy, at no cost, and give way at once?

Two engines of one core each, and a learner on the first of the two cores: the second engine stands apart from it and
its device may be leased while it works, as an engine with a GPU of its own may.

Drift. RL runs with a drafter that is trained on idle engines: the offline one, at a learning rate that moves the
policy, once per seed; and an untrained one, at the arena's own, with the first seed. At the end of each the engines
get, by turns, the drafter of the run and the offline drafter as it was, and sample the same prompts with the policy
that the run has arrived at: two runs of one seed part ways, so that accepted lengths of two runs would be of two
policies. Draft length is fixed.

    online_over_frozen          accepted length of the drafter that was trained on, over the same drafter left alone;
                                of the worst seed
    from_scratch_over_offline   of the untrained drafter after the run, over the offline one
    idle_used                   seconds of training over seconds in which an engine without rollouts could be leased

Cost. One run in which every batch of prompts comes twice, with devices leased and not leased, the order changing from
pair to pair. It samples almost greedily and learns almost nothing, so that both steps of a pair do the same work.

    step_time_ratio, makespan_ratio     leased over not leased, medians of pairs

Give way. A device is leased, and after a random moment its engine gets a request for one token.

    recall_p99_ms               from the request to the token, here in the driver

As documented. The run that docs/speculation.md shows, with devices leased and not by turns (lending.py).

    documented_kills, documented_step_ratio, documented_tokens_trained, lending_cost
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.lending import Pair, measure_documented, pairs_of, parts_of, start_arena, train_by_turns
from paceline.arena.prompts import arena_task
from paceline.cluster.placement import Cluster
from paceline.config import Config, LearnedDrafter, load_config
from paceline.context import Context
from paceline.measure import CpuTimes, Result, environment, middle, paired
from paceline.metrics import JsonlSink, Recorder, read_metrics
from paceline.orchestrator.drafter_training import OnlineDrafterTraining
from paceline.orchestrator.generate import generate_on_all
from paceline.orchestrator.journal import Journal
from paceline.orchestrator.loop import train
from paceline.sessions.draft import WarmStart, train_drafter
from paceline.sessions.train import load_tokenizer, with_drafter
from paceline.sessions.workloads import resolve_policy
from paceline.types import GroupId, Prompt, RolloutRequest

DRAFT_LENGTH = 5
TURNS = 4
PROMPTS_PER_TURN = 64
SPECULATION = [
    "speculation.drafter.kind=eagle3",
    f"speculation.max_draft_length={DRAFT_LENGTH}",
    "speculation.selector.kind=fixed",
    f"speculation.selector.draft_length={DRAFT_LENGTH}",
]
ARENA = ["learner.cpus=1", "eval.every=0"]
STRONG = ["learner.learning_rate=3e-4", "rollout.max_tokens=384", "objective.drop_uniform_groups=false"]
"""Six times what the arena learns best with: the policy unlearns its task, responses would grow without end, and soon
most groups have equal rewards. They stay in, because what is left out is not scored either, and nothing would be
handed over."""
LEASED = ["speculation.training.mode=idle", "speculation.training.when=always"]
SAME_WORK = [
    "rollout.temperature=0.01",
    "rollout.group_size=1",
    "rollout.prompts_per_step=128",
    "objective.drop_uniform_groups=false",
    "learner.learning_rate=1e-12",
]


def run(
    *,
    context: Context,
    config_file: Path,
    overrides: Sequence[str] = (),
    seeds: Sequence[int] = (0, 1, 2),
    steps: int = 40,
    pairs: int = 16,
    recalls: int = 210,
) -> Result:
    before = CpuTimes.now()
    offline = [*ARENA, *SPECULATION, *LEASED, "speculation.drafter.path=arena:small/eagle3", *overrides]
    first = with_drafter(load_config(config_file, offline), context)
    curves: dict[str, list[list[float]]] = {"online": [], "from scratch": []}
    ratios: dict[str, list[list[float]]] = {"online": [], "from scratch": []}
    idle_used = []
    with TemporaryDirectory() as scratch:
        untrained = _untrained(Path(scratch, "untrained"), context)
        for seed in seeds:
            arms = [("online", STRONG), ("from scratch", [f'speculation.drafter.path="{untrained}"'])]
            for arm, settings in arms if seed == seeds[0] else arms[:1]:
                config = load_config(config_file, [*offline, *settings, f"run.seed={seed}", f"run.steps={steps}"])
                config = with_drafter(config, context)
                context.progress(f"seed {seed}, {arm}: {steps} steps")
                metrics = Path(scratch, f"{arm}-{seed}.jsonl")
                turns = asyncio.run(_drift(config, metrics, _drafter_path(first), context))
                records = read_metrics(metrics)
                curves[arm].append([record["metrics"]["rollout/accepted_length"] for record in records["step"]])
                idle_used.append(_idle_used(records))
                ratios[arm].append([own / left_alone for own, left_alone in turns])
                lengths = [median(of_turns) for of_turns in zip(*turns, strict=True)]
                context.progress(
                    f"seed {seed}, {arm}: accepted length {lengths[0]:.2f}, of the offline drafter {lengths[1]:.2f}"
                )
        config = load_config(config_file, [*offline, *SAME_WORK, f"run.steps={2 * pairs}"])
        config = with_drafter(config, context)
        steps_on_off, recall_s = asyncio.run(_cost(config, Path(scratch, "pairs.jsonl"), pairs, recalls, context))
        documented = measure_documented(config_file, overrides, steps, Path(scratch), context)
    figures, spread, by_pair = paired(
        {
            "online_over_frozen": min(ratios["online"], key=median),
            "from_scratch_over_offline": ratios["from scratch"][0],
            "step_time_ratio": [on["time/step"] / off["time/step"] for on, off in steps_on_off],
            "makespan_ratio": [on["rollout/makespan_s"] / off["rollout/makespan_s"] for on, off in steps_on_off],
        }
    )
    measured = {
        "recall_p99_ms": (1000 * float(np.quantile(recall_s, 0.99)), 1000 * (max(recall_s) - min(recall_s))),
        "idle_used": middle(idle_used),
        **documented.figures,
    }
    return Result(
        name="drafter",
        figures=figures | {name: figure for name, (figure, _) in measured.items()},
        spread=spread | {name: width for name, (_, width) in measured.items()},
        goals={
            "online_over_frozen": (">=", 1.2),
            "from_scratch_over_offline": (">=", 0.8),
            "step_time_ratio": ("<=", 1.01),
            "makespan_ratio": ("<=", 1.01),
            "recall_p99_ms": ("<=", 150.0),
            "idle_used": (">=", 0.8),
            **documented.goals,
        },
        environment=environment(seeds=seeds, config=config.model_dump(mode="json")),
        details={
            "accepted_length_by_step": curves,
            "online_over_frozen_by_seed": ratios["online"],
            "paired": by_pair,
            "pairs": len(steps_on_off),
            "ratio_of_sums": sum(on["time/step"] for on, _ in steps_on_off)
            / sum(off["time/step"] for _, off in steps_on_off),
            "recalls": len(recall_s),
            "recall_median_ms": 1000 * float(np.median(recall_s)),
            "documented": documented.details,
            "steal_share": CpuTimes.now().steal_share_since(before),
        },
    )


def _drafter_path(config: Config) -> Path:
    assert config.speculation is not None and isinstance(config.speculation.drafter, LearnedDrafter)
    return Path(config.speculation.drafter.path)


def _untrained(out: Path, context: Context) -> Path:
    """A drafter as `paceline draft train` makes it, before it has learnt anything: one optimizer step of its
    warm-up."""
    model_path = resolve_policy("arena:small", context)
    prompts = arena_task(load_tokenizer(model_path), seed=7, num_heldout=0).prompts
    recipe = WarmStart(train_tokens=1, rollout_tokens=2_000, heldout_tokens=1_000, max_num_seqs=64)
    evaluation = train_drafter(
        "eagle3",
        model_path,
        prompts,
        out,
        recipe,
        policy="arena:small",
        data="arena problems, seed 7",
        context=context,
    )
    context.progress(f"untrained drafter: accepted length {evaluation.accepted_length[DRAFT_LENGTH - 1]:.2f}")
    return out


async def _drift(config: Config, metrics: Path, offline: Path, context: Context) -> list[tuple[float, float]]:
    """One run; then, by turns, accepted lengths of its drafter and of the offline one on the policy that it ended
    with."""
    async with start_arena(config, context) as (cluster, task, score):
        recorder = Recorder(JsonlSink(metrics))
        await train(parts_of(cluster, task.prompts, score), config, recorder)
        recorder.close()
        cluster.drafter.save(metrics.with_suffix(".drafter"))
        own, turns = metrics.with_suffix(".drafter") / "model.safetensors", []
        for turn in range(TURNS):
            prompts = list(islice(task.prompts, PROMPTS_PER_TURN))
            files = (own, offline / "model.safetensors")
            found = {
                file: await _accepted_length(cluster, file, prompts, config, 1_000 + turn)
                for file in files[:: 1 - 2 * (turn % 2)]
            }
            turns.append((found[files[0]], found[files[1]]))
    return turns


async def _accepted_length(
    cluster: Cluster, drafter: Path, prompts: Sequence[Prompt], config: Config, version: int
) -> float:
    receipts = await cluster.sender.send_drafter(drafter, version)
    assert all(receipt.ok for receipt in receipts), receipts
    requests = [
        RolloutRequest(
            group_id=GroupId(i),
            index=0,
            prompt_ids=prompt.token_ids,
            max_tokens=config.rollout.max_tokens,
            temperature=1.0,
        )
        for i, prompt in enumerate(prompts)
    ]
    rollouts = await generate_on_all(cluster.engines, requests)
    return 1 + sum(r.num_accepted for r in rollouts) / sum(r.num_verifications for r in rollouts)


def _idle_used(records: dict[str, list[dict[str, Any]]]) -> float:
    """Over all steps; a device could be leased from the second on, when the buffer holds something."""
    total = {
        name: sum(record["metrics"][f"draft/{name}"] for record in records["step"])
        for name in ("training_s", "leasable_s")
    }
    return total["training_s"] / total["leasable_s"]


async def _cost(
    config: Config, metrics: Path, pairs: int, recalls: int, context: Context
) -> tuple[list[Pair], list[float]]:
    recorder = Recorder(JsonlSink(metrics))
    async with start_arena(config, context) as (cluster, task, score):
        context.progress(f"{pairs} pairs of steps, devices leased and not")
        await train_by_turns(cluster, task, score, config, recorder)
        prompt_ids = next(task.prompts).token_ids
        request = RolloutRequest(group_id=GroupId(0), index=0, prompt_ids=prompt_ids, max_tokens=1, temperature=1.0)
        recall_s = await _recalls(cluster, recorder, request, recalls, context)
    recorder.close()
    return pairs_of(read_metrics(metrics)["step"]), recall_s


async def _recalls(
    cluster: Cluster, recorder: Recorder, request: RolloutRequest, number: int, context: Context
) -> list[float]:
    """Seconds from a request for a leased device to its first token."""
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
        times = []
        for index in range(number):
            times.append(await once(index))
            if (index + 1) % 50 == 0:
                context.progress(f"{index + 1} recalls, median {1000 * float(np.median(times)):.0f} ms")
        await training.close_phase()
    return times
