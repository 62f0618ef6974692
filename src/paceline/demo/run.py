"""The demo: two timelines of the same tokens, a few RL steps, one page.

batch ──▶ plain vLLM ──▶ timeline, tokens ┐
  └─────▶ Paceline ────▶ timeline, tokens ┴▶ speed-up, equal tokens
arena:small, speculation and idle drafter training ──▶ learning curve
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from paceline.config import EagleDrafter, EngineConfig, MeasuredSelector, SpeculationConfig, load_config
from paceline.context import Context
from paceline.demo.batch import DemoTimeline, long_tailed_batch, play, shown
from paceline.demo.page import write_demo_page
from paceline.devices import fast_precision
from paceline.measure import Result, environment
from paceline.report.summary import summary
from paceline.rollout.stepped import Order, SteppedBatch, SteppedEngine
from paceline.sessions import train as session
from paceline.sessions.workloads import resolve_drafter, resolve_policy
from paceline.types import RolloutRequest

_MAX_DRAFT_LENGTH = 7
_MOST_REQUESTS = 64
_WARM_UP = 24
"""Untimed tokens of each request, to warm up caches and the selector as in a running training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    model: str = "arena:large"
    num_requests: int
    longest: int
    rl_steps: int
    """RL steps; 0 skips training, which takes a minute to start."""
    max_seconds: float


FULL = Size(num_requests=12, longest=280, rl_steps=3, max_seconds=300.0)
QUICK = Size(num_requests=8, longest=100, rl_steps=0, max_seconds=120.0)


def run(
    *, context: Context, config_file: Path, page: Path, overrides: Sequence[str] = (), size: Size = FULL, seed: int = 0
) -> Result:
    began_s = time.monotonic()
    model_path = resolve_policy(size.model, context)
    drafter = resolve_drafter(f"{size.model}/eagle3", context)
    requests = long_tailed_batch(model_path, num_requests=size.num_requests, longest=size.longest, seed=seed)
    timelines, batches = _compare(model_path, drafter, requests, size.model, seed, context)
    plain, ours = timelines
    num_equal = sum(one == other for one, other in zip(*(batch.token_ids for batch in batches), strict=True))
    context.progress(f"same tokens with and without speculation: {num_equal} of {len(requests)} rollouts")
    config = load_config(
        config_file,
        [
            f"run.steps={max(1, size.rl_steps)}",
            f"eval.every={max(1, size.rl_steps)}",
            f"rollout.engine.dtype={fast_precision()}",
            *overrides,
        ],
    )
    directory = session.run(config, context) if size.rl_steps else None
    spread: dict[str, float] = {}
    figures = {
        "seconds": time.monotonic() - began_s,
        "speedup": plain.seconds / ours.seconds,
        "equal_rollouts": num_equal / len(requests),
        "accepted_tokens": float(sum(step.num_accepted for step in batches[1].steps)),
    }
    if directory is not None:
        learned = summary(directory)
        assert learned.accuracy_start is not None and learned.accuracy_end is not None
        figures["accuracy_gain"] = learned.accuracy_end - learned.accuracy_start
        variance = sum(right * (1 - right) for right in (learned.accuracy_start, learned.accuracy_end))
        spread["accuracy_gain"] = 2 * math.sqrt(variance / config.eval.num_prompts)
    result = Result(
        name="demo",
        figures=figures,
        spread=dict.fromkeys(figures, 0.0) | spread,
        goals={
            "seconds": ("<=", size.max_seconds),
            "speedup": (">=", 1.5),
            "equal_rollouts": (">=", 0.9),  # in bfloat16 a tie between two tokens may fall the other way
            "accepted_tokens": (">=", 1.0),
        },
        environment=environment(seeds=[seed], config=config.model_dump(mode="json")),
        details={"size": asdict(size), "timelines": [asdict(line) for line in timelines]},
    )
    write_demo_page(page, result, timelines, directory)
    return result


def _compare(
    model_path: Path, drafter: Path, requests: list[RolloutRequest], model: str, seed: int, context: Context
) -> tuple[list[DemoTimeline], list[SteppedBatch]]:
    """Return timelines and batches of plain vLLM and Paceline."""
    config = EngineConfig(dtype=fast_precision(), max_model_len=768, max_num_seqs=_MOST_REQUESTS, kv_cache_gb=1.0)
    # Two engines share the GPU.
    config = config.model_copy(update={"gpu_memory_utilization": config.gpu_memory_utilization / 2})
    speculation = SpeculationConfig(
        drafter=EagleDrafter(path=str(drafter)), max_draft_length=_MAX_DRAFT_LENGTH, verification="coupled"
    )
    timelines = [DemoTimeline(name=name, num_requests=len(requests)) for name in ("plain vLLM", "Paceline")]
    selectors = (None, MeasuredSelector())
    warm_up = [replace(request, max_tokens=_WARM_UP) for request in requests]
    batches: list[SteppedBatch] = []
    context.progress(f"starting two engines on {model}, with speculation and without")
    with ExitStack() as stack:
        # Start both at once, since a start uses one core; then each runs alone on all cores.
        engines = [
            SteppedEngine(model_path, config, seed=seed + number, cpus=sorted(os.sched_getaffinity(0)), speculation=arm)
            for number, arm in enumerate((None, speculation))
        ]
        for engine in engines:
            stack.callback(engine.close)
        for engine, selector in zip(engines, selectors, strict=True):
            engine.wait()
            engine.run(Order(requests=warm_up, selector=selector, name="demo", to_the_end=True))
        for engine, selector, timeline in zip(engines, selectors, timelines, strict=True):
            with shown([line for line in timelines if line is timeline or line.at_s], context) as watch:
                batches.append(play(engine, requests, timeline, selector=selector, watch=watch))
    return timelines, batches
