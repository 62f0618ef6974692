"""What the checks are about: a config with its policy, drafters and prompts, and the engine and learner made of them.

Everything is found or started when a check first asks for it, so that what is wrong with it is that check's failure."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Coroutine
from contextlib import ExitStack
from functools import cached_property
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
from paceline.doctor.troubles import Trouble, foreign_drafter
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
from paceline.types import DeviceKind, Prompt, Rollout, RolloutRequest, Sample, Tokenizer
from paceline.weights.check import TensorSpec, inventory
from paceline.weights.shared_memory import ShmSender

T = TypeVar("T")

LEARNED = tuple(KINDS)
NUM_PROMPTS = 32
_MAX_TOKENS = 64
_DRAFT_LENGTH = 5
"""Where the config names none."""
_LEARNING_RATE = 3e-4
"""Large enough that one update is seen in the log-probabilities of a BF16 engine."""
BYTES_TO_SCORE, BYTES_TO_UPDATE = 5, 17
"""Bytes of the learner for each parameter, FP32 with activations: weights; and with gradients and AdamW's moments."""


class Setup:
    """One config under examination, in a `with` block that ends whatever was started."""

    def __init__(self, config: Config, context: Context, *, plant: Trouble | None = None) -> None:
        self.config = config
        self.context = context
        self.plant = plant
        self.engine: VllmEngine | None = None
        self.main_started = False
        """Whether the engine that most checks use has been up."""
        self.runner: str | None = None
        """vLLM's model runner, `v1` or `v2`, once an engine has told."""
        self.version = 0
        """Policy version that was pushed last."""
        self._loop = asyncio.Runner()
        self._open = ExitStack()
        self._scratch = Path(self._open.enter_context(tempfile.TemporaryDirectory(prefix="paceline-doctor-")))
        self._drafters: dict[str, Path | Exception | None] = {}
        self._rollouts: dict[float, list[Rollout]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.stop_engine()
        finally:
            self._open.close()
            self._loop.close()

    def run(self, job: Coroutine[Any, Any, T]) -> T:
        """Wait for something that an engine does; all of them live on one event loop."""
        return self._loop.run(job)

    # Policy, prompts and drafters.

    @cached_property
    def model_path(self) -> Path:
        return workloads.resolve_policy(self.config.policy.model, self.context)

    @cached_property
    def tensors(self) -> dict[str, TensorSpec]:
        return inventory(self.model_path)

    @property
    def num_parameters(self) -> int:
        return sum(int(np.prod(spec.shape)) for spec in self.tensors.values())

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.model_path)

    @cached_property
    def task(self) -> Task:
        return workloads.make_task(self.config, self.tokenizer)

    @cached_property
    def prompts(self) -> list[Prompt]:
        """Prompts that leave room for a response."""
        room = self.config.rollout.engine.max_model_len
        fitting = [prompt for prompt in islice(self.task.prompts, 4 * NUM_PROMPTS) if len(prompt.token_ids) + 2 < room]
        if not fitting:
            raise ValueError(f"rollout.engine.max_model_len: got {room}; must be more because no prompt fits")
        return list(islice(cycle(fitting), NUM_PROMPTS))

    def drafter(self, kind: str) -> Path | None:
        """Return the checkpoint of the learned drafter of this kind: the config's own, or the one that comes with the
        policy; None if there is neither. Raises when it does not fit the policy."""
        if kind not in self._drafters:
            try:
                self._drafters[kind] = self._find_drafter(kind)
            except Exception as error:  # noqa: BLE001  raised below, now and whenever it is asked for again
                self._drafters[kind] = error
        found = self._drafters[kind]
        if isinstance(found, Exception):
            raise found
        return found

    def _find_drafter(self, kind: str) -> Path | None:
        own, named = self.config.speculation, workloads.split(self.config.policy.model)
        asked = None if own is None or own.has_new_drafter else own.drafter
        if isinstance(asked, LearnedDrafter) and asked.kind == kind:
            name = asked.path
        elif named is not None:
            name = named[0]
        else:
            return None
        path = workloads.resolve_drafter(name, self.config.policy.model, self.context, kind=kind)
        preflight(path, self.model_path, kind=kind, max_model_len=self.engine_config.max_model_len)
        return foreign_drafter(path, self._scratch / kind) if self.plant == "drafter" else path

    @cached_property
    def kind(self) -> str:
        """Drafter of the engine that most checks use: the config's; without one EAGLE-3, if there is one that fits."""
        own = self.config.speculation
        asked = "eagle3" if own is None else own.drafter.kind
        try:
            return "ngram" if asked in LEARNED and self.drafter(asked) is None else asked
        except Exception:  # noqa: BLE001  its own check says what is wrong with it; the engine is examined without it
            return "ngram"

    def speculation(self, kind: str, *, hold: bool) -> SpeculationConfig:
        """Speculation with a drafter of this kind, its draft length chosen as configured, or held at the largest."""
        own = self.config.speculation
        length = _DRAFT_LENGTH if own is None else own.max_draft_length
        settings: dict[str, Any] = {"drafter": {"kind": kind}, "max_draft_length": length}
        if own is not None and own.drafter.kind == kind:
            settings |= {"drafter": own.drafter.model_dump(), "selector": own.selector.model_dump()}
        if kind in LEARNED:
            settings["drafter"] |= {"path": str(self.drafter(kind)), "weights": "full"}
        if hold:
            settings["selector"] = FixedSelector(draft_length=length).model_dump()
        return SpeculationConfig.model_validate(settings)

    # Engines.

    @property
    def engine_config(self) -> EngineConfig:
        """The config's engine without FP8, whose gap to the learner would hide others; FP8 has a check of its own."""
        return self.config.rollout.engine.in_full_precision

    def start_engine(
        self, name: str, speculation: SpeculationConfig | None, config: EngineConfig | None = None
    ) -> VllmEngine:
        """Start an engine in place of the one before: one GPU may have room for one at a time."""
        self.stop_engine()
        self.engine = self.run(
            VllmEngine.start(
                name,
                self.model_path,
                config or self.engine_config,
                seed=self.config.run.seed,
                cpus=sorted(os.sched_getaffinity(0)) if on_cpu() else None,
                speculation=speculation,
            )
        )
        return self.engine

    def stop_engine(self) -> None:
        engine, self.engine = self.engine, None
        if engine is not None:
            self.run(engine.close())

    @property
    def running(self) -> VllmEngine:
        assert self.engine is not None, "checks that use the engine need the one that starts it"
        return self.engine

    def generate(self, temperature: float) -> list[Rollout]:
        """One rollout for each prompt."""
        room = min(_MAX_TOKENS, self.config.rollout.max_tokens)
        longest = self.config.rollout.engine.max_model_len
        requests = [
            RolloutRequest(
                group_id=index,
                index=0,
                prompt_ids=prompt.token_ids,
                max_tokens=min(room, longest - len(prompt.token_ids) - 1),
                temperature=temperature,
            )
            for index, prompt in enumerate(self.prompts)
        ]
        return self.run(generate_all(self.running, requests))

    def first_rollouts(self, temperature: float) -> list[Rollout]:
        """What the engine said at this temperature before anything was pushed to it."""
        if temperature not in self._rollouts:
            self._rollouts[temperature] = self.generate(temperature)
        return self._rollouts[temperature]

    # The learner and its weights.

    def learner_device(self, *, update: bool = False) -> DeviceKind | None:
        """Where the learner has room, beside the engine: a GPU, the host, or nowhere."""
        needed = 10**9 + self.num_parameters * (BYTES_TO_UPDATE if update else BYTES_TO_SCORE)
        # Of what an engine leaves it takes half: vLLM refuses to start where it finds less than its own share.
        share = (1 - self.engine_config.gpu_memory_utilization) / 2
        if any(min(gpu.free, share * gpu.total) > needed for gpu in gpu_memory()[:1]):
            return "gpu"
        return "cpu" if psutil.virtual_memory().available > needed else None

    @cached_property
    def learner(self) -> FsdpLearner:
        """A learner that has room for an update, or at least for scoring."""
        learner = FsdpLearner(
            self.model_path,
            LearnerConfig(learning_rate=_LEARNING_RATE, microbatch_tokens=2048),
            ObjectiveConfig(),
            temperature=self.config.rollout.temperature,
            device=self.learner_device(update=True) or self.learner_device(),
        )
        self._open.callback(learner.close)
        return learner

    def gap(self, rollouts: list[Rollout]) -> Mismatch:
        """Gap between the engine's log-probabilities of these rollouts and the learner's."""
        scores = self.learner.logp([Sample.of(rollout, 0.0) for rollout in rollouts]).logp
        return mismatch(np.concatenate([rollout.logp for rollout in rollouts]), np.concatenate(scores))

    @cached_property
    def sender(self) -> ShmSender:
        sender = ShmSender()
        self._open.callback(sender.close)
        return sender
