"""What FP8 gains and what it costs in a rollout phase, with speculation and without it.

    speed      arena:large, decode steps by batch and context; engines take turns, visit by visit, in a random order
                 without speculation: {BF16, FP8 weights, FP8 KV cache, both}
                 with EAGLE-3:        {BF16, FP8 weights, both}
    capacity   tokens that a KV cache of the same bytes holds
    mismatch   k3 of {BF16, weights, KV cache, both} x {speculation off, on} on arena:small, whose every layer was
               trained: the layers that growth adds are identities without quantisation error. Weights and scales are
               pushed as in a run.

With speculation, tokens per second are the accepted length over the step time. The accepted length is pooled over all
batches of an arm and draft length: it does not depend on the batch, and over a few steps of one request it would be
noise. A step is bound by memory while a BF16 step of as many tokens takes at most half as long again as one of a single
token.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from statistics import median

import numpy as np
import torch
from transformers import AutoTokenizer

from benchmarks.workload import ENGINE, arena_requests, one_of
from paceline.arena.task import problems, solution
from paceline.config import EagleDrafter, EngineConfig, FixedSelector, LearnerConfig, ObjectiveConfig, SpeculationConfig
from paceline.context import Context
from paceline.fp8 import KvScales
from paceline.learner.fsdp import FsdpLearner
from paceline.learner.objective import mismatch
from paceline.measure import CpuTimes, Goal, Result, environment, paired
from paceline.orchestrator.generate import generate_all
from paceline.rollout.engine import VllmEngine
from paceline.rollout.stepped import Order, SteppedBatch, SteppedEngine
from paceline.sessions.workloads import resolve_drafter, resolve_policy
from paceline.types import GroupId, Rollout, RolloutRequest, Sample
from paceline.weights.shared_memory import ShmSender

ARMS: Mapping[str, dict[str, str]] = {
    "bf16": {},
    "weights": {"weights": "fp8"},
    "kv": {"kv_cache": "fp8"},
    "both": {"weights": "fp8", "kv_cache": "fp8"},
}
DRAFTING_ARMS = ("bf16", "weights", "both")
BATCHES = (1, 2, 4, 8, 16, 32)
DRAFT_LENGTHS = (3, 5)
CONTEXTS = {"short": 0, "long": 480}
"""Fewest tokens of the prompt; the long ones are problems with most of their solution."""
_STEPS = {0: 12, 3: 8, 5: 8}
"""Steps of a visit by draft length, if every draft were accepted whole."""
_MEMORY_BOUND = 1.5
CONFIG = ENGINE.model_copy(update={"max_num_seqs": max(BATCHES), "kv_cache_gb": 1.5})
GOALS: dict[str, Goal] = {"fp8_spec_speedup": (">=", 1.2), "kv_capacity_ratio": (">=", 1.9)}


@dataclass(frozen=True, slots=True)
class PrecisionCell:
    context: str
    batch: int
    k: int
    """0 is an engine without a drafter."""


@dataclass(slots=True)
class Timings:
    """Median step of each of an arm's visits to a cell, and its draft counts by draft length."""

    step_s: dict[PrecisionCell, list[float]] = field(default_factory=lambda: defaultdict(list))
    emitted: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    rows: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    """Requests over all steps: each emits its accepted length."""
    capacity: int = 0

    def accepted_length(self, k: int) -> float:
        return self.emitted[k] / self.rows[k] if k else 1.0

    def rates(self, cell: PrecisionCell) -> list[float]:
        """Tokens per second, visit by visit."""
        return [cell.batch * self.accepted_length(cell.k) / seconds for seconds in self.step_s[cell]]


def run(
    *,
    context: Context,
    model: str = "arena:large",
    trained: str = "arena:small",
    repetitions: int = 3,
    seed: int = 0,
) -> Result:
    before = CpuTimes.now()
    model_path = resolve_policy(model, context)
    drafter = resolve_drafter(f"{model}/eagle3", context)
    speculation = SpeculationConfig(drafter=EagleDrafter(path=str(drafter)), max_draft_length=max(DRAFT_LENGTHS))
    timings = {arm: Timings() for arm in ARMS}
    for how in (None, speculation):
        _time(timings, model_path, how, repetitions, seed, context)
    small = resolve_policy(trained, context)
    small_drafter = resolve_drafter(f"{trained}/eagle3", context)
    k3 = asyncio.run(_mismatches(small, small_drafter, seed, context))
    return _result(timings, k3, {"model": model, "trained": trained}, seed, CpuTimes.now().steal_share_since(before))


# Speed and capacity.


def _time(
    timings: Mapping[str, Timings],
    model_path: Path,
    speculation: SpeculationConfig | None,
    repetitions: int,
    seed: int,
    context: Context,
) -> None:
    lengths = (0,) if speculation is None else DRAFT_LENGTHS
    engines: dict[str, SteppedEngine] = {}
    try:
        arms = ARMS if speculation is None else DRAFTING_ARMS
        for arm in arms:  # one after another: compiling wants every core
            context.progress(f"starting {arm}{'' if speculation is None else ' with speculation'}")
            config = one_of(CONFIG.model_copy(update=ARMS[arm]), len(arms))
            cpus = sorted(os.sched_getaffinity(0))
            engines[arm] = SteppedEngine(model_path, config, seed=seed, cpus=cpus, speculation=speculation)
            capacity = engines[arm].wait()
            if speculation is None:  # with a drafter, part of the cache is its own
                timings[arm].capacity = capacity
        prompts = {context: _prompts(model_path, least, seed) for context, least in CONTEXTS.items()}
        cells = [PrecisionCell(context, batch, k) for context in CONTEXTS for batch in BATCHES for k in lengths]
        largest = [cell for cell in cells if cell.batch == max(BATCHES)]
        for number in range(repetitions + 1):  # the first fills prefix caches and is not measured
            rng = random.Random(number)  # noqa: S311
            for cell in rng.sample(cells, len(cells)) if number else largest:
                for arm in rng.sample(list(engines), len(engines)):
                    batch = engines[arm].run(_order(cell, prompts[cell.context]))
                    if number:
                        _note(timings[arm], cell, batch)
            context.progress(f"pass {number} of {repetitions} over {len(cells)} cells")
    finally:
        for engine in engines.values():
            engine.close()


def _order(cell: PrecisionCell, prompts: Sequence[RolloutRequest]) -> Order:
    # As many tokens as the steps can emit at the most, so that nobody leaves the batch before they are over.
    requests = [replace(prompt, max_tokens=_STEPS[cell.k] * (cell.k + 1)) for prompt in prompts[: cell.batch]]
    selector = FixedSelector(draft_length=cell.k) if cell.k else None
    return Order(requests=requests, selector=selector, name=f"k={cell.k}", to_the_end=True)


def _note(timings: Timings, cell: PrecisionCell, batch: SteppedBatch) -> None:
    if not cell.k:
        timings.step_s[cell].append(median(seconds for active, seconds in batch.step_s[1:] if active == cell.batch))
        return
    steps = [step for step in batch.steps[1:] if step.verified == cell.k and step.num_requests == cell.batch]
    timings.step_s[cell].append(median(step.seconds for step in steps))
    timings.emitted[cell.k] += sum(step.num_emitted for step in steps)
    timings.rows[cell.k] += sum(step.num_requests for step in steps)


def _prompts(model_path: Path, least: int, seed: int) -> list[RolloutRequest]:
    """Arena prompts; with `least` tokens, the longest problems with enough of a solution to be that long."""
    if not least:
        return arena_requests(model_path, num_prompts=max(BATCHES), group_size=1, max_tokens=1, seed=seed)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    rng = random.Random(seed)  # noqa: S311
    chosen = sorted(islice(problems(seed), 5000), key=lambda problem: -len(problem.terms))
    texts = (tokenizer.encode(problem.prompt + solution(problem, rng)) for problem in chosen)
    ids = list(islice((text[:least] for text in texts if len(text) > least), max(BATCHES)))
    assert len(ids) == max(BATCHES), "5000 problems have enough long ones"
    return [
        RolloutRequest(
            group_id=GroupId(group), index=0, prompt_ids=np.asarray(prompt, np.int32), max_tokens=1, temperature=1.0
        )
        for group, prompt in enumerate(ids)
    ]


# Mismatch.


async def _mismatches(
    model_path: Path, drafter: Path, seed: int, context: Context, num_prompts: int = 128
) -> dict[str, dict[str, float]]:
    """k3 by arm, without and with speculation."""
    learner = FsdpLearner(
        model_path,
        LearnerConfig(world_size=1, dtype="float32", microbatch_tokens=4096),
        ObjectiveConfig(),
        temperature=1.0,
        seed=seed,
    )
    requests = arena_requests(model_path, num_prompts=num_prompts, group_size=1, max_tokens=640, seed=seed)
    selector = FixedSelector(draft_length=max(DRAFT_LENGTHS))
    speculation = SpeculationConfig(
        drafter=EagleDrafter(path=str(drafter)), max_draft_length=max(DRAFT_LENGTHS), selector=selector
    )
    sender = ShmSender()
    found: dict[str, dict[str, float]] = {}
    try:
        for arm, precision in ARMS.items():
            found[arm] = {}
            config = EngineConfig(max_model_len=768, max_num_seqs=64, kv_cache_gb=0.5).model_copy(update=precision)
            for on, how in (("off", None), ("on", speculation)):
                rollouts = await _rollouts(model_path, config, how, learner, sender, requests, seed)
                if learner.kv_scales is None:  # the first arm's rollouts, which are BF16's
                    learner.calibrate([Sample.of(rollout, 0.0) for rollout in rollouts], version=0)
                found[arm][on] = sampled_k3(learner, rollouts)
                context.progress(f"k3 of {arm}, speculation {on}: {found[arm][on]:.2e}")
    finally:
        sender.close()
        learner.close()
    return found


async def _rollouts(
    model_path: Path,
    config: EngineConfig,
    speculation: SpeculationConfig | None,
    learner: FsdpLearner,
    sender: ShmSender,
    requests: Sequence[RolloutRequest],
    seed: int,
) -> list[Rollout]:
    cpus = sorted(os.sched_getaffinity(0))
    engine = await VllmEngine.start("precision", model_path, config, seed=seed, cpus=cpus, speculation=speculation)
    try:
        await push(engine, learner, sender, version=0)
        return await generate_all(engine, requests)
    finally:
        await engine.close()


async def push(
    engine: VllmEngine, learner: FsdpLearner, sender: ShmSender, version: int, scales: KvScales | None = None
) -> None:
    """Push the learner's policy as a run would, with its own KV scales unless others are given."""
    scales = (scales or learner.kv_scales) if engine.config.kv_cache == "fp8" else None
    quantised = engine.config.weights == "fp8"
    receipt = await engine.receive(
        sender.stage(version, learner.weights(torch.bfloat16), quantised=quantised, kv_scales=scales)
    )
    if not receipt.ok:
        raise RuntimeError(f"{receipt.engine} did not take version {version}: {receipt.error}")


def sampled_k3(learner: FsdpLearner, rollouts: Sequence[Rollout]) -> float:
    """Estimate of KL(engine || learner) on what the engine sampled."""
    scores = learner.score([Sample.of(rollout, 0.0) for rollout in rollouts]).logp
    gap = mismatch(np.concatenate([rollout.logp for rollout in rollouts]), np.concatenate(scores))
    return gap.k3_sum / gap.count


# Figures.


def _result(
    timings: Mapping[str, Timings],
    k3: Mapping[str, Mapping[str, float]],
    models: Mapping[str, str],
    seed: int,
    steal_share: float,
) -> Result:
    plain = {cell: _ratios(timings, "both", cell) for cell in timings["bf16"].step_s if cell.k == 0}
    drafted = {cell: ratios for cell, ratios in _best(timings, "both").items() if _memory_bound(timings["bf16"], cell)}
    figures, spread, pairs = paired(
        {
            "fp8_spec_speedup": [median(ratios) for ratios in drafted.values()],
            "fp8_plain_speedup": [
                median(ratios) for cell, ratios in plain.items() if _memory_bound(timings["bf16"], cell)
            ],
        }
    )
    figures["kv_capacity_ratio"] = timings["kv"].capacity / timings["bf16"].capacity
    figures |= {f"k3_{arm}{'_spec' if on == 'on' else ''}": value for arm, by in k3.items() for on, value in by.items()}
    return Result(
        name="precision",
        figures=figures,
        spread={name: spread.get(name, 0.0) for name in figures},
        goals=GOALS,
        environment=environment(seeds=[seed], config={**models, "engine": CONFIG.model_dump(mode="json")}),
        details={
            "tokens_per_s": _table(timings, lambda arm, cell: median(timings[arm].rates(cell))),
            "over_bf16": _table(timings, lambda arm, cell: median(_ratios(timings, arm, cell))),
            "step_ms": _table(timings, lambda arm, cell: 1000 * median(timings[arm].step_s[cell])),
            "accepted_length": {
                arm: {str(k): timings[arm].accepted_length(k) for k in DRAFT_LENGTHS} for arm in DRAFTING_ARMS
            },
            "kv_tokens": {arm: t.capacity for arm, t in timings.items()},
            "memory_bound": [f"{cell.context} {cell.batch}" for cell in drafted],
            "loses_at": sorted(
                f"{arm} {cell.context} {cell.batch} k={cell.k}"
                for arm in ARMS
                for cell in timings[arm].step_s
                if arm != "bf16" and median(_ratios(timings, arm, cell)) < 1
            ),
            "paired": pairs,
            "k3": {arm: dict(by) for arm, by in k3.items()},
            "steal_share": steal_share,
        },
    )


def _ratios(timings: Mapping[str, Timings], arm: str, cell: PrecisionCell) -> list[float]:
    """Rates of an arm over those of BF16 in the same pass."""
    return [mine / theirs for mine, theirs in zip(timings[arm].rates(cell), timings["bf16"].rates(cell), strict=True)]


def _best(timings: Mapping[str, Timings], arm: str) -> dict[PrecisionCell, list[float]]:
    """Ratios with speculation, each arm at its best draft length, under the cell of the shortest draft length."""
    found = {}
    for cell in (cell for cell in timings[arm].step_s if cell.k == DRAFT_LENGTHS[0]):
        mine, theirs = (
            max((timings[a].rates(replace(cell, k=k)) for k in DRAFT_LENGTHS), key=median) for a in (arm, "bf16")
        )
        found[cell] = [a / b for a, b in zip(mine, theirs, strict=True)]
    return found


def _memory_bound(bf16: Timings, cell: PrecisionCell) -> bool:
    """Whether memory binds, by plain BF16 steps of as many tokens at the same context; a single request is bound."""
    alone, as_many = PrecisionCell(cell.context, 1, 0), PrecisionCell(cell.context, cell.batch * (cell.k + 1), 0)
    if cell.batch == 1:
        return True
    return as_many in bf16.step_s and median(bf16.step_s[as_many]) <= _MEMORY_BOUND * median(bf16.step_s[alone])


def _table(timings: Mapping[str, Timings], value: Callable[[str, PrecisionCell], float]) -> dict[str, dict[str, float]]:
    """By cell, then by arm."""
    return {
        f"{cell.context} batch {cell.batch} k {cell.k}": {
            arm: round(value(arm, cell), 4) for arm, found in timings.items() if cell in found.step_s
        }
        for cell in sorted(timings["bf16"].step_s, key=lambda cell: (cell.k, cell.context, cell.batch))
    }
