"""`paceline bench overhead`: what our layer over vLLM costs, as tokens/s of our engine over tokens/s of bare `vllm.LLM`.

Both engines are alive at once, have the same settings and get the same prompts with the same seeds, log-probabilities included.
They take turns, and take turns at going first. Each is bound to one core, as in a run.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from paceline.arena.policy import resolve
from paceline.arena.task import problems
from paceline.config import EngineConfig
from paceline.evidence.measure import CpuTimes, Result, environment, middle
from paceline.rollout.bare import BareEngine
from paceline.rollout.engine import VllmEngine
from paceline.types import RolloutRequest

# vLLM's processes spin for a second after their last step; the engine that rests must not take cycles from the one that is timed.
_SETTLE_S = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """One arm's turn."""

    num_tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class _Workload:
    """A policy and what it is asked for."""

    model: str
    prompts: int
    max_tokens: int


# `ratio` is about steps that cost what a large model's do; `ratio_small` about the worst case, steps of a few milliseconds where
# worker, EngineCore and front end have two cores between them.
_WORKLOADS = {
    "ratio": _Workload(model="arena:large", prompts=4, max_tokens=32),
    "ratio_small": _Workload(model="arena:small", prompts=16, max_tokens=256),
}


def run(*, progress: Callable[[str], None], cache_root: Path, group_size: int = 8, repetitions: int = 5, seed: int = 0) -> Result:
    """Time both arms of each workload `repetitions` times, after one pass each that is not counted."""
    config = EngineConfig(max_model_len=768, kv_cache_gb=0.5)
    before = CpuTimes.now()
    figures: dict[str, float] = {}
    spread: dict[str, float] = {}
    details: dict[str, object] = {"repetitions": repetitions, "group_size": group_size}
    for name, workload in _WORKLOADS.items():
        path = resolve(workload.model, cache_root=cache_root, progress=progress)
        progress(f"{name}: {workload.model}")
        batches = _batches(path, workload, num=repetitions + 1, group_size=group_size, seed=seed)
        ours, bare = _measure(path, config, batches, seed, progress)
        ratios = [a.tokens_per_s / b.tokens_per_s for a, b in zip(ours, bare, strict=True)]
        figures[name], spread[name] = middle(ratios)
        for arm, turns in (("ours", ours), ("bare", bare)):
            key = f"{arm}_tokens_per_s_{workload.model.removeprefix('arena:')}"
            figures[key], spread[key] = middle([turn.tokens_per_s for turn in turns])
        tokens = {"ours_tokens": [turn.num_tokens for turn in ours], "bare_tokens": [turn.num_tokens for turn in bare]}
        details[name] = {"workload": asdict(workload), "ratios": ratios, **tokens}
    return Result(
        name="overhead",
        figures=figures,
        spread=spread,
        goals={"ratio": (">=", 0.98)},
        environment=environment(seeds=[seed], config={"engine": config.model_dump(mode="json")}),
        details={**details, "steal_share": CpuTimes.now().steal_share_since(before)},
    )


def _batches(path: Path, workload: _Workload, *, num: int, group_size: int, seed: int) -> list[list[RolloutRequest]]:
    """`num` batches of arena prompts; every request has a seed of its own, so that both arms draw the same responses."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    texts = [problem.prompt for problem in islice(problems(seed), num * workload.prompts)]
    requests = [
        RolloutRequest(
            group_id=group,
            index=index,
            prompt_ids=np.asarray(tokenizer.encode(text), np.int32),
            max_tokens=workload.max_tokens,
            temperature=1.0,
            seed=seed + group * group_size + index,
        )
        for group, text in enumerate(texts)
        for index in range(group_size)
    ]
    size = workload.prompts * group_size
    return [requests[first : first + size] for first in range(0, num * size, size)]


def _measure(
    path: Path, config: EngineConfig, batches: Sequence[Sequence[RolloutRequest]], seed: int, progress: Callable[[str], None]
) -> tuple[list[_Pass], list[_Pass]]:
    cpus = sorted(os.sched_getaffinity(0))[:1]
    ours: list[_Pass] = []
    bare: list[_Pass] = []
    with asyncio.Runner() as runner:
        reference = BareEngine(path, config, seed=seed, cpus=cpus)
        engine = runner.run(VllmEngine.start("overhead", path, config, seed=seed, cpus=cpus))
        try:
            for number, batch in enumerate(batches):
                for arm in ("ours", "bare") if number % 2 else ("bare", "ours"):
                    time.sleep(_SETTLE_S)
                    if arm == "ours":
                        ours.append(runner.run(_our_pass(engine, batch)))
                    else:
                        bare.append(_bare_pass(reference, batch))
                ratio = ours[-1].tokens_per_s / bare[-1].tokens_per_s
                progress(f"pass {number} of {len(batches) - 1}: {ours[-1].tokens_per_s:.0f} tokens/s, {ratio:.3f} of bare vLLM")
        finally:
            runner.run(engine.close())
            reference.close()
    return ours[1:], bare[1:]  # the first pass of each is the warm-up


async def _our_pass(engine: VllmEngine, requests: Sequence[RolloutRequest]) -> _Pass:
    began_s = time.perf_counter()
    await engine.submit(requests)
    lengths: list[int] = []
    while len(lengths) < len(requests):
        lengths += [len(rollout.token_ids) for rollout in await engine.collect()]
    return _Pass(num_tokens=sum(lengths), seconds=time.perf_counter() - began_s)


def _bare_pass(reference: BareEngine, requests: Sequence[RolloutRequest]) -> _Pass:
    began_s = time.perf_counter()
    responses = reference.generate(requests)
    return _Pass(num_tokens=sum(map(len, responses)), seconds=time.perf_counter() - began_s)
