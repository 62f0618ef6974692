"""Coupled verification on the CPU's runner: tokens do not depend on drafts, batches or engines."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from coupled_cases import (
    PENALTIES,
    TRUNCATION,
    accepted,
    arena_prompts,
    change_sampling,
    coupled,
    explore,
    of_arena,
    sample,
    seeded,
    tokens,
)
from paceline import assets
from paceline.config import EngineConfig, SpeculationConfig
from paceline.rollout.engine import VllmEngine

CONFIG = EngineConfig(dtype="float32", max_model_len=256, max_num_seqs=16, kv_cache_gb=0.05)
REQUESTS = seeded(arena_prompts(12), max_tokens=48)


@contextmanager
def started(
    runner: asyncio.Runner, speculation: SpeculationConfig | None, *, seed: int = 0, **changes: Any
) -> Iterator[VllmEngine]:
    config = CONFIG.model_copy(update=changes)
    adjust = None if speculation is None else explore
    path = assets.policy("tiny")
    engine = runner.run(VllmEngine.start("test", path, config, seed=seed, speculation=speculation, adjust=adjust))
    try:
        yield engine
    finally:
        runner.run(engine.close())


@pytest.fixture(scope="module")
def plain(runner: asyncio.Runner) -> list[list[int]]:
    """What an engine without speculation says."""
    with started(runner, None) as engine:
        return tokens(sample(runner, engine, REQUESTS))


@pytest.fixture(scope="module")
def eagle(runner: asyncio.Runner) -> Iterator[VllmEngine]:
    """An engine whose cache is too small for all requests at once."""
    with started(runner, coupled(of_arena("eagle3")), seed=1, kv_cache_gb=0.0005) as engine:
        yield engine


def test_preempted_and_reordered_requests_say_what_plain_decoding_says(
    runner: asyncio.Runner, plain: list[list[int]], eagle: VllmEngine
) -> None:
    """Noise by row of the batch or by count of draws would repeat none of it. Temperatures 0 to 1.3 in one batch."""
    for limit in (None, 1, 4, 0):
        rollouts = sample(runner, eagle, REQUESTS, limit=limit)
        assert tokens(rollouts) == plain
        num_accepted, num_drafted = accepted(rollouts)
        assert num_accepted >= 0.3 * num_drafted, "rejected drafts alone would say little"
        assert (num_drafted > 0) == (limit != 0)
    assert runner.run(eagle.metrics())["engine/preemptions"] > 0
    assert tokens(sample(runner, eagle, REQUESTS[::-3])) == sorted(plain[::-3], key=plain.index)


def test_another_seed_says_something_else(runner: asyncio.Runner, plain: list[list[int]], eagle: VllmEngine) -> None:
    """Noise that ignored the seed would pass every comparison."""
    others = seeded([request.prompt_ids for request in REQUESTS], max_tokens=48, first_seed=100)
    said = tokens(sample(runner, eagle, others))
    assert [mine == theirs for mine, theirs in zip(said, plain, strict=True)] == [
        request.temperature == 0 for request in REQUESTS
    ]


@pytest.mark.parametrize("settings", [TRUNCATION, PENALTIES], ids=lambda settings: next(iter(settings)))
def test_other_sampling_parameters_are_coupled_too(
    runner: asyncio.Runner, eagle: VllmEngine, monkeypatch: pytest.MonkeyPatch, settings: dict[str, float]
) -> None:
    """Penalties at a drafted position count the drafts before it, and truncation is applied in three places."""
    before = tokens(sample(runner, eagle, REQUESTS, limit=0))
    change_sampling(monkeypatch, settings)
    without, with_drafts = (sample(runner, eagle, REQUESTS, limit=limit) for limit in (0, None))
    assert tokens(with_drafts) == tokens(without) != before
    assert accepted(with_drafts)[0] > 0


@pytest.mark.parametrize("kind", ["dflash", "history"])
def test_every_drafter_says_what_plain_decoding_says(runner: asyncio.Runner, plain: list[list[int]], kind: str) -> None:
    """DFlash draws all drafts at once; history, as n-grams, draws none."""
    with started(runner, coupled(of_arena(kind)), seed=2) as engine:
        for _ in range(2):  # history drafts from the first
            rollouts = sample(runner, engine, REQUESTS)
            assert tokens(rollouts) == plain
            assert accepted(rollouts)[1] > 0


def test_every_draft_of_a_drafter_that_equals_the_policy_is_accepted(
    runner: asyncio.Runner, plain: list[list[int]]
) -> None:
    """A drafter with other noise, or with noise of another position, would be right by chance only, and nothing but
    speed would tell."""
    same = {"method": "draft_model", "model": str(assets.policy("tiny")), "draft_sample_method": "probabilistic"}
    with started(runner, coupled({"kind": "vllm", "settings": same})) as engine:
        rollouts = sample(runner, engine, REQUESTS)
        assert tokens(rollouts) == plain
        num_accepted, num_drafted = accepted(rollouts)
        # A draft after the end of a rollout is drafted, and nobody asks.
        assert num_accepted > 0.9 * num_drafted > 0
