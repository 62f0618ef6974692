"""What our layer costs, as tokens/s of our engine over those of bare `vllm.LLM`.

Both engines are alive at once, have the same settings and get the same prompts with the same seeds, log-probabilities
included. They take turns, and take turns at going first. Each is bound to one core, as in a run.

Then an engine that speculates and compiles starts twice, first with empty caches: how much of a start the compile cache
saves.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.bare import BareEngine
from benchmarks.workload import arena_requests
from paceline.config import EagleDrafter, EngineConfig, SpeculationConfig
from paceline.context import Context
from paceline.measure import CpuTimes, Result, environment, middle, paired
from paceline.orchestrator.generate import generate_all
from paceline.rollout.engine import VllmEngine
from paceline.sessions.workloads import resolve_drafter, resolve_policy
from paceline.types import RolloutRequest

# vLLM's processes spin for a second after their last step; the engine that rests must not take cycles from the one that
# is timed.
_SETTLE_S = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """One arm's turn."""

    num_tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


def run(
    *,
    context: Context,
    environ: MutableMapping[str, str],
    model: str = "arena:small",
    drafter: str = "arena:small/eagle3",
    prompts: int = 16,
    group_size: int = 8,
    max_tokens: int = 256,
    repetitions: int = 9,
    seed: int = 0,
) -> Result:
    """Time both arms `repetitions` times, after one pass each that is not counted; then two starts.

    `environ` is `os.environ`, which vLLM's processes inherit; it is restored at the end."""
    path = resolve_policy(model, context)
    drafter_path = resolve_drafter(drafter, context)
    config = EngineConfig(max_model_len=768, max_num_seqs=64, kv_cache_gb=0.5)
    before = CpuTimes.now()
    batches = _batches(
        path, num=repetitions + 1, prompts=prompts, group_size=group_size, max_tokens=max_tokens, seed=seed
    )
    ours, bare = _measure(path, config, batches, seed, context)
    # Last: by now this process has imported vLLM, and its files are in memory, for the first start as for the second.
    starts = asyncio.run(_start_twice(path, drafter_path, environ, seed, context))
    ratios = [a.tokens_per_s / b.tokens_per_s for a, b in zip(ours, bare, strict=True)]
    figures, spread, pairs = paired({"ratio": ratios})
    figures["ours_tokens_per_s"], spread["ours_tokens_per_s"] = middle([turn.tokens_per_s for turn in ours])
    figures["bare_tokens_per_s"], spread["bare_tokens_per_s"] = middle([turn.tokens_per_s for turn in bare])
    figures["warm_start_ratio"], spread["warm_start_ratio"] = starts[1] / starts[0], 0.0
    return Result(
        name="overhead",
        figures=figures,
        spread=spread,
        goals={"ratio": (">=", 0.98), "warm_start_ratio": ("<=", 0.5)},
        environment=environment(seeds=[seed], config={"model": model, "engine": config.model_dump(mode="json")}),
        details={
            "repetitions": repetitions,
            "rollouts_per_repetition": prompts * group_size,
            "max_tokens": max_tokens,
            "paired": pairs,
            "ours_tokens": [turn.num_tokens for turn in ours],
            "bare_tokens": [turn.num_tokens for turn in bare],
            "start_seconds": dict(zip(("cold", "warm"), starts, strict=True)),
            "steal_share": CpuTimes.now().steal_share_since(before),
        },
    )


def _batches(
    path: Path, *, num: int, prompts: int, group_size: int, max_tokens: int, seed: int
) -> list[list[RolloutRequest]]:
    """Make `num` batches of arena prompts; each request has its own seed, so both arms draw the same responses."""
    unseeded = arena_requests(path, num_prompts=num * prompts, group_size=group_size, max_tokens=max_tokens, seed=seed)
    requests = [replace(request, seed=seed + number) for number, request in enumerate(unseeded)]
    size = prompts * group_size
    return [requests[first : first + size] for first in range(0, num * size, size)]


def _measure(
    path: Path,
    config: EngineConfig,
    batches: Sequence[Sequence[RolloutRequest]],
    seed: int,
    context: Context,
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
                context.progress(
                    f"pass {number} of {len(batches) - 1}: {ours[-1].tokens_per_s:.0f} tokens/s, "
                    f"{ratio:.3f} of bare vLLM"
                )
        finally:
            runner.run(engine.close())
            reference.close()
    return ours[1:], bare[1:]  # the first pass of each is the warm-up


async def _our_pass(engine: VllmEngine, requests: Sequence[RolloutRequest]) -> _Pass:
    began_s = time.perf_counter()
    rollouts = await generate_all(engine, requests)
    return _Pass(num_tokens=sum(len(rollout.token_ids) for rollout in rollouts), seconds=time.perf_counter() - began_s)


def _bare_pass(reference: BareEngine, requests: Sequence[RolloutRequest]) -> _Pass:
    began_s = time.perf_counter()
    responses = reference.generate(requests)
    return _Pass(num_tokens=sum(map(len, responses)), seconds=time.perf_counter() - began_s)


async def _start_twice(
    path: Path, drafter: Path, environ: MutableMapping[str, str], seed: int, context: Context
) -> list[float]:
    """Seconds of both starts of a speculating, compiled engine."""
    config = EngineConfig(max_model_len=768, max_num_seqs=64, kv_cache_gb=0.5, compile=True)
    speculation = SpeculationConfig(drafter=EagleDrafter(path=str(drafter)), max_draft_length=3)
    cpus = sorted(os.sched_getaffinity(0))
    seconds: list[float] = []
    with _empty_caches(environ):
        for what in ("with empty caches", "again"):
            context.progress(f"starting a speculating, compiled engine {what}")
            began_s = time.perf_counter()
            engine = await VllmEngine.start("start", path, config, seed=seed, cpus=cpus, speculation=speculation)
            seconds.append(time.perf_counter() - began_s)
            await engine.close()
            context.progress(f"it took {seconds[-1]:.1f} s")
    return seconds


@contextmanager
def _empty_caches(environ: MutableMapping[str, str]) -> Iterator[None]:
    """Have vLLM, torch and Triton keep compiled code in a directory that ends with the block."""
    with tempfile.TemporaryDirectory(prefix="paceline-") as directory:
        caches = {
            name: str(Path(directory, name))
            for name in ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
        }
        before = {name: environ.get(name) for name in caches}
        environ.update(caches)
        try:
            yield
        finally:
            for name, value in before.items():
                environ.pop(name)
                if value is not None:
                    environ[name] = value
