"""Siblings together on real engines: a prompt is read once, not once by every engine.

`PACELINE_PAIRS=3 pytest -s tests/engine/test_siblings.py` shows the figures.
tests/unit/orchestrator/test_siblings.py has a simulated fleet of 64."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from statistics import median

import numpy as np

from paceline import assets
from paceline.config import EngineConfig
from paceline.orchestrator.fleet import Fleet
from paceline.orchestrator.groups import Sampling
from paceline.orchestrator.members import Members
from paceline.orchestrator.online_drafter import OnlineDrafter
from paceline.rollout.engine import VllmEngine
from paceline.types import Prompt

NUM_GROUPS, GROUP_SIZE = 8, 8
PROMPT_TOKENS, RESPONSE_TOKENS = 30 * 32 + 1, 16  # whole blocks, and the token that vLLM always computes
MAX_NUM_SEQS = 4
PAIRS = int(os.environ.get("PACELINE_PAIRS", "1"))


async def prompt_tokens(engines: Sequence[VllmEngine]) -> float:
    """Tokens of prompts that were computed so far, and not found in a cache."""
    counts = [await engine.metrics() for engine in engines]
    return sum(count["engine/prefix_cache_queries"] - count["engine/prefix_cache_hits"] for count in counts)


def test_a_prompt_is_read_once(runner: asyncio.Runner, two_cpus: list[int]) -> None:
    """Dealt out in turn, siblings have their prompt read by both engines. The fleet does so with what fits at once, so
    that an engine which other tests slow down does not take fewer of them."""
    config = EngineConfig(dtype="float32", max_model_len=1024, max_num_seqs=MAX_NUM_SEQS, kv_cache_gb=0.5)
    rng = np.random.default_rng(0)

    async def generate(engines: list[VllmEngine], max_in_flight: int = MAX_NUM_SEQS + 1) -> tuple[float, float]:
        """Times that a prompt was read, on average, and seconds of a batch of new prompts."""
        prompts = [
            Prompt(id=str(number), text="", token_ids=rng.integers(3, 12, PROMPT_TOKENS, np.int32), row={})
            for number in range(NUM_GROUPS)
        ]
        before, began_s = await prompt_tokens(engines), time.monotonic()
        async with Fleet(
            Members(engines), OnlineDrafter(), max_in_flight=max_in_flight, on_lost=lambda *_: None
        ) as fleet:
            sampling = Sampling(group_size=GROUP_SIZE, temperature=1.0, max_tokens=RESPONSE_TOKENS)
            assert len(await fleet.open(prompts, sampling).wait()) == NUM_GROUPS
        seconds = time.monotonic() - began_s
        return (await prompt_tokens(engines) - before) / (NUM_GROUPS * PROMPT_TOKENS), seconds

    async def by_turns() -> list[tuple[tuple[float, float], tuple[float, float]]]:
        policy = assets.policy("small")
        engines = [
            await VllmEngine.start(f"engine-{i}", policy, config, seed=i, cpus=two_cpus[i : i + 1]) for i in range(2)
        ]
        try:
            await generate(engines)  # meets memory and kernels for the first time
            pairs = []
            for _ in range(PAIRS):
                together = await generate(engines)
                pairs.append((together, await generate(engines, max_in_flight=NUM_GROUPS * GROUP_SIZE)))
            return pairs
        finally:
            for engine in engines:
                await engine.close()

    pairs = runner.run(by_turns())
    together, dealt_out = (median(arm[0] for arm in arms) for arms in zip(*pairs, strict=True))
    ratios = sorted(apart[1] / one[1] for one, apart in pairs)
    print(f"times that a prompt is read: {together:.2f} together, {dealt_out:.2f} dealt out; makespan {ratios} times")
    assert dealt_out > 1.8
    assert together < 1.3
