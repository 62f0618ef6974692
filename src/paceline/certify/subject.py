"""What `paceline certify` is asked about, how much it samples, what it finds, and the engines it samples from."""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from paceline.config import Config, EngineConfig, LearnedDrafter, SpeculationConfig
from paceline.files import read_jsonl
from paceline.measure import Goal
from paceline.orchestrator.generate import generate_all
from paceline.rollout.engine import VllmEngine
from paceline.rollout.internals.request_ids import rollout_key
from paceline.rollout.speculation import own_settings
from paceline.types import Prompt, Rollout, RolloutRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is sampled; the default takes under five minutes on two cores with the arena's small policy."""

    sampler_rows: int = 20_000
    num_prompts: int = 12
    samples_per_prompt: int = 192
    tokens: int = 32
    """Length up to which two engines are compared."""
    long_rollouts: int = 48
    long_tokens: int = 128
    """Greedy rollouts and those that the learner scores."""


QUICK = Effort(sampler_rows=1000, num_prompts=3, samples_per_prompt=64, tokens=16, long_rollouts=12, long_tokens=64)
"""Enough to see that everything runs; too little for the verdict LOSSLESS."""


@dataclass(slots=True, kw_only=True)
class Findings:
    """What the parts have found so far."""

    figures: dict[str, float] = field(default_factory=dict)
    goals: dict[str, Goal] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    """Why the verdict cannot be LOSSLESS even if every test is passed."""
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, value: float, goal: Goal | None = None) -> None:
        self.figures[name] = float(value)
        if goal is not None:
            self.goals[name] = goal


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Whose losslessness is in question."""

    model_path: Path
    prompts: Sequence[Prompt]
    config: Config
    without_shim: bool
    seed: int

    @property
    def speculation(self) -> SpeculationConfig:
        if self.config.speculation is None:
            raise ValueError(
                "speculation: got None; must be set because without speculation there is nothing to certify"
            )
        return self.config.speculation


async def generate(
    subject: Subject, config: EngineConfig, requests: Sequence[RolloutRequest], *, speculate: bool, seed: int
) -> tuple[list[Rollout], dict[tuple[int, int], list[tuple[int, int]]]]:
    """Rollouts in order of their key; and of each, drafts and emitted tokens step by step."""
    with tempfile.TemporaryDirectory() as directory:
        trace = Path(directory, "steps.jsonl")
        engine = await VllmEngine.start(
            "with" if speculate else "without",
            subject.model_path,
            config,
            seed=seed,
            cpus=sorted(os.sched_getaffinity(0)),
            speculation=_speculation(subject, config) if speculate else None,
            adjust=partial(_trace_to, trace) if speculate else None,
            stock_sampler=subject.without_shim and speculate,
        )
        try:
            rollouts: list[Rollout] = []
            # Greedy requests come last: a drafter that learns from rollouts then has something to say about them.
            for part in ([r for r in requests if r.temperature], [r for r in requests if not r.temperature]):
                rollouts += await generate_all(engine, part)
        finally:
            await engine.close()
        steps = read_trace(trace) if trace.is_file() else {}
    return sorted(rollouts, key=lambda rollout: rollout.key), steps


def _trace_to(trace: Path, args: Any) -> None:
    """Have the scheduler write a line for every step; `args` are vLLM's AsyncEngineArgs."""
    own_settings(args.additional_config)["trace"] = str(trace)


def _speculation(subject: Subject, config: EngineConfig) -> SpeculationConfig:
    speculation = subject.speculation
    if config.dtype == "bfloat16" or not isinstance(speculation.drafter, LearnedDrafter):
        return speculation
    drafter = speculation.drafter.model_copy(update={"weights": "full"})  # vLLM quantises from BF16 only
    return speculation.model_copy(update={"drafter": drafter})


def read_trace(trace: Path) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """(draft tokens, emitted tokens) of each step of each rollout, from the scheduler's trace."""
    steps: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for _, record in read_jsonl(trace, strict=True):
        for request_id, num_drafts, num_emitted in record["requests"]:
            steps[rollout_key(request_id)].append((num_drafts, num_emitted))
    return steps
