"""Rollouts of an engine with coupled verification, with drafts and without."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from paceline import assets
from paceline.arena.task import problems
from paceline.config import SpeculationConfig
from paceline.orchestrator.generate import generate_all
from paceline.rollout import engine as engine_module
from paceline.rollout.engine import VllmEngine
from paceline.types import GroupId, Rollout, RolloutRequest, Tokens

if TYPE_CHECKING:
    from vllm import SamplingParams

TEMPERATURES = (1.0, 0.6, 0.0, 1.3)
TRUNCATION = {"top_p": 0.8, "top_k": 20}
PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2}
"""Parameters of vLLM that our requests do not have."""


def change_sampling(monkeypatch: pytest.MonkeyPatch, settings: Mapping[str, Any]) -> None:
    """Add settings to the sampling parameters of all requests."""
    stock = engine_module.sampling_params

    def changed(*arguments: Any) -> SamplingParams:
        params = stock(*arguments)
        for name, value in settings.items():
            setattr(params, name, value)
        return params

    monkeypatch.setattr(engine_module, "sampling_params", changed)


def arena_prompts(num: int) -> list[Tokens]:
    tokenizer = AutoTokenizer.from_pretrained(assets.policy("tiny"))
    return [np.array(tokenizer(problem.prompt)["input_ids"], np.int32) for problem in islice(problems(0), num)]


def coupled(drafter: dict[str, Any], *, max_draft_length: int = 4) -> SpeculationConfig:
    return SpeculationConfig.model_validate(
        {
            "drafter": drafter,
            "max_draft_length": max_draft_length,
            "verification": "coupled",
            "selector": {"kind": "beg_mab"},
        }
    )


def of_arena(kind: str) -> dict[str, Any]:
    return {"kind": kind, "path": str(assets.drafter("tiny", kind))} if kind in assets.DRAFTERS else {"kind": kind}


def explore(args: Any) -> None:
    """Draft a random number of tokens at every step; for `VllmEngine.start(adjust=...)`."""
    args.scheduler_cls = "exploring_scheduler.AdaptiveScheduler"


def seeded(prompts: Sequence[Tokens], *, max_tokens: int, first_seed: int = 0) -> list[RolloutRequest]:
    """A request for each prompt, at several temperatures."""
    return [
        RolloutRequest(
            group_id=GroupId(number),
            index=0,
            prompt_ids=prompt,
            max_tokens=max_tokens,
            temperature=TEMPERATURES[number % len(TEMPERATURES)],
            seed=first_seed + number,
        )
        for number, prompt in enumerate(prompts)
    ]


def sample(
    runner: asyncio.Runner, engine: VllmEngine, requests: Sequence[RolloutRequest], *, limit: int | None = None
) -> list[Rollout]:
    async def rollouts() -> list[Rollout]:
        await engine.set_draft_limit(limit)
        return await generate_all(engine, requests)

    return runner.run(rollouts())


def tokens(rollouts: Sequence[Rollout]) -> list[list[int]]:
    return [rollout.token_ids.tolist() for rollout in rollouts]


def accepted(rollouts: Sequence[Rollout]) -> tuple[int, int]:
    """Accepted and drafted tokens."""
    return sum(rollout.num_accepted for rollout in rollouts), sum(rollout.num_drafted for rollout in rollouts)
