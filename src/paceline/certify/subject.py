"""Subject, effort, findings and engines of `paceline certify`."""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from paceline.certify.lossless import KINDS, LENGTHS, VOCABULARY, Drafts, Sampler
from paceline.config import Config, EngineConfig, LearnedDrafter, SpeculationConfig
from paceline.files import read_jsonl
from paceline.measure import Goal
from paceline.orchestrator.generate import generate_all
from paceline.rollout.engine import VllmEngine
from paceline.rollout.internals.model_runner import Runner
from paceline.rollout.internals.requests import rollout_id
from paceline.rollout.speculation import own_settings
from paceline.types import PacelineError, Prompt, Rollout, RolloutId, RolloutRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Numbers of samples; the default takes under five minutes on two cores with the arena's small policy."""

    sampler_rows: int = 20_000
    """Verifications per case and temperature."""
    kinds: tuple[Drafts, ...] = KINDS
    lengths: tuple[int, ...] = LENGTHS
    vocabulary: int = VOCABULARY
    """Kind of draft, its lengths, and vocabulary of the sampler's cases."""
    num_prompts: int = 12
    samples_per_prompt: int = 192
    tokens: int = 32
    """Length of the comparison of two engines."""
    long_rollouts: int = 48
    long_tokens: int = 128
    """Greedy rollouts, and rollouts that the learner scores."""
    exact_tokens: int = 20_000
    """Fewest tokens to compare, with coupled verification."""
    exact_length: int = 128
    max_seconds: float = 300.0
    conclusive: bool = True
    """True if it suffices for the verdict LOSSLESS."""


QUICK = Effort(
    sampler_rows=1000,
    num_prompts=3,
    samples_per_prompt=64,
    tokens=16,
    long_rollouts=12,
    long_tokens=64,
    exact_tokens=2000,
    exact_length=64,
    conclusive=False,
)
"""Enough to run every part."""


class EngineFault(Protocol):
    """A fault inside the sampler of a running engine."""

    def adjust(self, args: Any) -> None:
        """Change vLLM's AsyncEngineArgs so that the fault can be planted."""
        ...

    async def plant(self, engine: VllmEngine) -> None:
        """Make the started engine faulty."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault planted on purpose, which certify must find (`benchmarks/planted`)."""

    name: str
    about: str
    """Description for the certificate."""
    sampler: Callable[[Sampler], Sampler] | None = None
    """Make the tested sampler faulty."""
    engine: EngineFault | None = None
    """Make engines that speculate faulty."""
    shifts_logp: bool = False
    """Shift the engine's log-probabilities by one token."""


@dataclass(slots=True, kw_only=True)
class Findings:
    figures: dict[str, float] = field(default_factory=dict)
    goals: dict[str, Goal] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    """Reasons against the verdict LOSSLESS even if every test passes."""
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, value: float, goal: Goal | None = None) -> None:
        self.figures[name] = float(value)
        if goal is not None:
            self.goals[name] = goal


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    model_path: Path
    prompts: Sequence[Prompt]
    config: Config
    without_shim: bool
    seed: int
    runner: Runner
    """vLLM's model runner in the engine."""
    fault: Fault | None = None

    @property
    def speculation(self) -> SpeculationConfig:
        if self.config.speculation is None:
            raise ValueError(
                "speculation: got None; must be set because without speculation there is nothing to certify"
            )
        return self.config.speculation


async def generate(
    subject: Subject, config: EngineConfig, requests: Sequence[RolloutRequest], *, speculate: bool, seed: int
) -> tuple[list[Rollout], dict[RolloutId, list[tuple[int, int]]]]:
    """Rollouts in order of their key, each with drafted and emitted tokens per step."""
    with tempfile.TemporaryDirectory() as directory:
        trace = Path(directory, "steps.jsonl")

        def adjust(args: Any) -> None:  # vLLM's AsyncEngineArgs
            if speculate:
                own_settings(args.additional_config)["trace"] = str(trace)  # the scheduler writes a line for every step

        speculation = subject.speculation if speculate else None
        rollouts: list[Rollout] = []
        async with running(subject, config, speculation, seed=seed, adjust=adjust) as engine:
            # Greedy requests come last, so that a drafter that learns from rollouts has drafts for them.
            for part in ([r for r in requests if r.temperature], [r for r in requests if not r.temperature]):
                rollouts += await generate_all(engine, part)
        steps = read_trace(trace) if trace.is_file() else {}
    return sorted(rollouts, key=lambda rollout: rollout.id), steps


@asynccontextmanager
async def running(
    subject: Subject,
    config: EngineConfig,
    speculation: SpeculationConfig | None,
    *,
    seed: int,
    adjust: Callable[[Any], None] = lambda args: None,
) -> AsyncIterator[VllmEngine]:
    """Start an engine. With speculation it has the subject's fault, and `adjust` changes its AsyncEngineArgs."""
    engine_fault = None if subject.fault is None or speculation is None else subject.fault.engine

    def adjust_all(args: Any) -> None:
        adjust(args)
        if engine_fault is not None:
            engine_fault.adjust(args)

    engine = await VllmEngine.start(
        "without" if speculation is None else "with",
        subject.model_path,
        config,
        seed=seed,
        cpus=sorted(os.sched_getaffinity(0)),
        speculation=None if speculation is None else _fitting(speculation, config),
        adjust=adjust_all,
        stock_sampler=subject.without_shim and speculation is not None,
    )
    try:
        if speculation is not None:
            await _check_runner(subject, engine)
            if engine_fault is not None:
                await engine_fault.plant(engine)
        yield engine
    finally:
        await engine.close()


async def _check_runner(subject: Subject, engine: VllmEngine) -> None:
    """Refuse an engine with another sampler than the one tested separately."""
    for worker in await engine.rpc("paceline_sampler"):
        if worker["runner"] != subject.runner:
            raise PacelineError(
                f"engine {engine.name}: it runs on vLLM's model runner {worker['runner']}, but its arguments announced "
                f"{subject.runner}, whose sampler was tested; set VLLM_USE_V2_MODEL_RUNNER to 0 or 1"
            )


def _fitting(speculation: SpeculationConfig, config: EngineConfig) -> SpeculationConfig:
    if config.dtype == "bfloat16" or not isinstance(speculation.drafter, LearnedDrafter):
        return speculation
    drafter = speculation.drafter.model_copy(update={"weights": "full"})  # vLLM quantizes from BF16 only
    return speculation.model_copy(update={"drafter": drafter})


def read_trace(trace: Path) -> dict[RolloutId, list[tuple[int, int]]]:
    """Return (draft tokens, emitted tokens) of each step of each rollout, from the scheduler's trace."""
    steps: dict[RolloutId, list[tuple[int, int]]] = defaultdict(list)
    for _, record in read_jsonl(trace, strict=True):
        for request_id, num_drafts, num_emitted in record["requests"]:
            steps[rollout_id(request_id)].append((num_drafts, num_emitted))
    return steps
