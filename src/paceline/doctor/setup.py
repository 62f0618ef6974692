"""Policy, drafter, prompts, engine and learner of a config.

Each is loaded or started on first use, so a problem is reported by the check that uses it first. Later checks that need
it are skipped."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from functools import cached_property, update_wrapper
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import psutil

from paceline.config import (
    Config,
    EngineConfig,
    FixedSelector,
    LearnedDrafter,
    LearnerConfig,
    ObjectiveConfig,
    SpeculationConfig,
)
from paceline.context import Context
from paceline.devices import gpu_memory
from paceline.doctor.finding import SkippedError
from paceline.drafters.checkpoint import preflight
from paceline.drafters.kinds import KINDS
from paceline.learner.fsdp import FsdpLearner
from paceline.learner.objective import Mismatch, mismatch
from paceline.orchestrator.generate import generate_all
from paceline.orchestrator.task import Task
from paceline.rollout.engine import VllmEngine
from paceline.rollout.internals.platform import on_cpu
from paceline.sessions import workloads
from paceline.sessions.train import load_tokenizer
from paceline.types import Prompt, Rollout, RolloutRequest, Sample
from paceline.weights.check import TensorSpec, inventory

T = TypeVar("T")

NUM_PROMPTS = 32
_MAX_TOKENS = 64
_DRAFT_LENGTH = 5
"""Used without a speculation config."""
_LEARNING_RATE = 3e-4
"""One update must be visible in the log-probabilities of a BF16 engine."""
LEARNER_BYTES = 17
"""Learner memory per parameter: weights, gradients, AdamW state and activations in FP32."""


def shared(otherwise: str) -> Callable[[Callable[[Setup], T]], cached_property[T]]:
    """Compute a property of Setup once. If it raises, later uses raise SkippedError with the reason `otherwise`."""

    def share(make: Callable[[Setup], T]) -> cached_property[T]:
        def attempt(setup: Setup) -> T:
            if otherwise in setup.failed:
                raise SkippedError(otherwise)
            try:
                return make(setup)
            except SkippedError:
                raise
            except Exception:
                setup.failed.add(otherwise)
                raise

        return cached_property(update_wrapper(attempt, make))

    return share


class Setup:
    """One config under examination. Leaving the `with` block stops engine and learner."""

    def __init__(self, config: Config, context: Context) -> None:
        self.config = config
        self.context = context
        self.version = 0
        """Policy version of the last push."""
        self.resources = ExitStack()
        """Closed at the end, last entered first."""
        self._loop = self.resources.enter_context(asyncio.Runner())
        self.failed: set[str] = set()
        """Reasons to skip what depends on a failed property."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.resources.close()

    def run(self, job: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the event loop of the engine."""
        return self._loop.run(job)

    @shared("there is no policy")
    def model_path(self) -> Path:
        return workloads.resolve_policy(self.config.policy.model, self.context)

    @shared("there is no policy")
    def tensors(self) -> dict[str, TensorSpec]:
        return inventory(self.model_path)

    @property
    def num_parameters(self) -> int:
        return sum(int(np.prod(spec.shape)) for spec in self.tensors.values())

    @shared("there are no prompts")
    def task(self) -> Task:
        return workloads.make_task(self.config, load_tokenizer(self.model_path))

    @shared("there are no prompts")
    def prompts(self) -> list[Prompt]:
        """Prompts that leave room for a response."""
        room = self.config.rollout.engine.max_model_len
        fitting = [prompt for prompt in islice(self.task.prompts, 4 * NUM_PROMPTS) if len(prompt.token_ids) + 2 < room]
        if not fitting:
            raise ValueError(f"rollout.engine.max_model_len: got {room}; must be more because no prompt fits")
        return list(islice(cycle(fitting), NUM_PROMPTS))

    @property
    def asked_kind(self) -> str:
        """Drafter kind of the config, or EAGLE-3 without speculation."""
        return "eagle3" if self.config.speculation is None else self.config.speculation.drafter.kind

    @shared("the drafter does not fit")
    def drafter(self) -> Path | None:
        """Checkpoint of the config's learned drafter or the policy's bundled one. Raises if it does not fit."""
        kind, own = self.asked_kind, self.config.speculation
        if kind not in KINDS:
            return None
        if own is not None and isinstance(own.drafter, LearnedDrafter) and not own.has_random_drafter:
            name = own.drafter.path
        elif workloads.arena_policy(self.config.policy.model) is not None:
            name = f"{self.config.policy.model}/{kind}"
        else:
            return None
        path = workloads.resolve_drafter(name, self.context)
        preflight(path, self.model_path, kind=kind, max_model_len=self.engine_config.max_model_len)
        return path

    @cached_property
    def kind(self) -> str:
        """Drafter kind of the examined engine: n-grams if there is no learned drafter that fits."""
        try:
            return "ngram" if self.asked_kind in KINDS and self.drafter is None else self.asked_kind
        except Exception:  # noqa: BLE001  the check `drafter` reports it
            return "ngram"

    @cached_property
    def speculation(self) -> SpeculationConfig:
        """The config's drafter in full precision, with the draft length fixed at the maximum."""
        own, kind = self.config.speculation, self.kind
        length = _DRAFT_LENGTH if own is None else own.max_draft_length
        drafter: dict[str, Any] = {"kind": kind}
        if own is not None and own.drafter.kind == kind:
            drafter = own.drafter.model_dump()
        if kind in KINDS:
            drafter |= {"path": str(self.drafter), "weights": "full"}
        selector = FixedSelector(draft_length=length).model_dump()
        return SpeculationConfig.model_validate({"drafter": drafter, "max_draft_length": length, "selector": selector})

    @property
    def engine_config(self) -> EngineConfig:
        """The config's engine in full precision: FP8 would hide a gap to the learner."""
        return self.config.rollout.engine.in_full_precision

    @shared("the engine did not start")
    def engine(self) -> VllmEngine:
        start = VllmEngine.start(
            "doctor",
            self.model_path,
            self.engine_config,
            seed=self.config.run.seed,
            cpus=sorted(os.sched_getaffinity(0)) if on_cpu() else None,
            speculation=self.speculation,
        )
        engine = self.run(start)
        self.resources.callback(lambda: self.run(engine.close()))
        return engine

    def generate(self, temperature: float) -> list[Rollout]:
        room = min(_MAX_TOKENS, self.config.rollout.max_tokens)
        longest = self.config.rollout.engine.max_model_len
        requests = [
            RolloutRequest.of(
                prompt, i, max_tokens=min(room, longest - len(prompt.token_ids) - 1), temperature=temperature
            )
            for i, prompt in enumerate(self.prompts)
        ]
        return self.run(generate_all(self.engine, requests))

    @shared("generation failed")
    def rollouts(self) -> list[Rollout]:
        """Rollouts at the config's temperature, sampled before the first push."""
        return self.generate(self.config.rollout.temperature)

    @shared("the learner did not load")
    def learner(self) -> FsdpLearner:
        needed = 10**9 + self.num_parameters * LEARNER_BYTES
        # Take half of what an engine leaves: vLLM refuses to start when less than its share is free.
        share = (1 - self.engine_config.gpu_memory_utilization) / 2
        on_gpu = any(min(gpu.free, share * gpu.total) > needed for gpu in gpu_memory()[:1])
        if not on_gpu and psutil.virtual_memory().available < needed:
            raise SkippedError(
                f"neither a GPU nor the host has {needed / 1e9:.0f} GB free for a learner in one process"
            )
        learner = FsdpLearner(
            self.model_path,
            LearnerConfig(world_size=1, dtype="float32", learning_rate=_LEARNING_RATE, microbatch_tokens=2048),
            ObjectiveConfig(),
            temperature=self.config.rollout.temperature,
            device="gpu" if on_gpu else "cpu",
        )
        self.resources.callback(learner.close)
        return learner

    def gap(self, rollouts: list[Rollout]) -> Mismatch:
        """Compare the engine's log-probabilities of these rollouts with the learner's."""
        scores = self.learner.score([Sample.of(rollout, 0.0) for rollout in rollouts]).logp
        return mismatch(np.concatenate([rollout.logp for rollout in rollouts]), np.concatenate(scores))
