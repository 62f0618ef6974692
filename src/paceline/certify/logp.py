"""`paceline certify logp`: compare the engine's log-probabilities with the learner's.

In FP32 the two must agree to rounding; in BF16, against a learner with FP32 master weights, the k3 estimate of
KL(engine || learner) must be small. The floor of each is the learner's difference from itself in other batches."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Literal

import numpy as np

from paceline.config import EngineConfig, LearnerConfig, ObjectiveConfig, RolloutConfig
from paceline.context import Context
from paceline.learner.fsdp import FsdpLearner
from paceline.learner.objective import Mismatch, mismatch
from paceline.measure import Result, environment
from paceline.orchestrator.generate import generate_until
from paceline.rollout.engine import VllmEngine
from paceline.types import Floats, Prompt, Rollout, RolloutRequest, Sample

Dtype = Literal["float32", "bfloat16"]


def certify(
    model_path: Path,
    prompts: Sequence[Prompt],
    config: RolloutConfig,
    *,
    context: Context,
    min_tokens: int = 2000,
    seed: int = 0,
) -> Result:
    """Compare the config's engine in FP32 and BF16 (where FP8 applies) on at least `min_tokens` tokens each."""
    temperature = config.temperature
    figures: dict[str, float] = {}
    details: dict[str, object] = {"model": model_path.name, "temperature": temperature}
    engines: dict[Dtype, EngineConfig] = {"float32": config.engine.in_full_precision, "bfloat16": config.engine}
    for (dtype, engine), short in zip(engines.items(), ("fp32", "bf16"), strict=True):
        arm = config.model_copy(update={"engine": engine.model_copy(update={"dtype": dtype})})
        context.progress(f"{short}: sampling with a {dtype} engine")
        rollouts = asyncio.run(_sample(model_path, prompts, arm, min_tokens, seed))
        samples = [Sample.of(rollout, 0.0) for rollout in rollouts]
        context.progress(f"{short}: scoring {sum(len(r.token_ids) for r in rollouts)} tokens with the learner")
        # As in a run, the learner is in FP32. The floor is measured in the engine's precision.
        scores = _score(model_path, samples, "float32", 4096, temperature)
        floor = _floor(model_path, samples, dtype, temperature)
        gap = _mismatch([rollout.logp for rollout in rollouts], scores)
        figures |= {f"{short}_max_abs": gap.max_abs, f"{short}_k3": gap.k3_sum / gap.count}
        figures |= {f"{short}_floor_max_abs": floor.max_abs, f"{short}_floor_k3": floor.k3_sum / floor.count}
        details[f"{short}_tokens"] = gap.count
    return Result(
        name="certify-logp",
        figures=figures,
        spread=dict.fromkeys(figures, 0.0),
        goals={"fp32_max_abs": ("<=", 1e-4), "bf16_k3": ("<=", 1e-3)},
        environment=environment(seeds=[seed], config=config.model_dump(mode="json")),
        details=details,
    )


async def _sample(
    model_path: Path, prompts: Sequence[Prompt], config: RolloutConfig, min_tokens: int, seed: int
) -> list[Rollout]:
    cpus = sorted(os.sched_getaffinity(0))
    requests = (
        RolloutRequest.of(prompt, number, max_tokens=config.max_tokens, temperature=config.temperature)
        for number, prompt in enumerate(prompts)
    )
    engine = await VllmEngine.start("certify", model_path, config.engine, seed=seed, cpus=cpus)
    try:
        rollouts = await generate_until(engine, requests, min_tokens=min_tokens, max_in_flight=16)
    finally:
        await engine.close()
    if sum(len(rollout.token_ids) for rollout in rollouts) < min_tokens:
        raise ValueError(
            f"prompts: got {len(prompts)}; must be more, because their rollouts have fewer than {min_tokens} tokens"
        )
    return rollouts


def _score(
    model_path: Path, samples: Sequence[Sample], dtype: Dtype, microbatch_tokens: int, temperature: float
) -> Sequence[Floats]:
    config = LearnerConfig(world_size=1, dtype=dtype, microbatch_tokens=microbatch_tokens)
    with closing(FsdpLearner(model_path, config, ObjectiveConfig(), temperature=temperature)) as learner:
        return learner.score(samples).logp


def _floor(model_path: Path, samples: Sequence[Sample], dtype: Dtype, temperature: float) -> Mismatch:
    """Compare the learner with itself: many samples per pass, and one sample per pass."""
    together = _score(model_path, samples, dtype, 8192, temperature)
    alone = _score(model_path, samples, dtype, 1, temperature)
    return _mismatch(together, alone)


def _mismatch(first: Sequence[Floats], second: Sequence[Floats]) -> Mismatch:
    return mismatch(np.concatenate(first), np.concatenate(second))
