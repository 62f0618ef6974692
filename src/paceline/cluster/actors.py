"""The processes of a run as Ray actors: each holds one engine, or one rank of the learner."""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]  public in its docs

from paceline.cluster.clock import this_machine
from paceline.config import CorrectionConfig, EngineConfig, LearnerConfig, ObjectiveConfig, SpeculationConfig
from paceline.devices import Transport, require, use_device
from paceline.drafters.rounds import drafter_weights
from paceline.drafters.worker import TrainerProcess, WorkerSettings
from paceline.files import remove_directory
from paceline.fp8 import Sharding
from paceline.learner.fsdp import FsdpLearner
from paceline.learner.hidden_states import HiddenStateWriter, HiddenStateWriterSettings
from paceline.types import (
    DeviceKind,
    PacelineError,
    PendingGradients,
    Receipt,
    Rollout,
    RolloutId,
    RolloutRequest,
    Sample,
    Scores,
)
from paceline.weights.deliver import join
from paceline.weights.distributed import DistributedSender, GroupAddress, host_store, join_store
from paceline.weights.message import Push
from paceline.weights.shared_memory import ShmSender

_LOOK_S = 0.1
"""How often an engine's actor checks that the trainer beside it is alive."""


class EngineActor:
    """A process with one engine in it."""

    async def start(
        self,
        name: str,
        model_path: str,
        config: EngineConfig,
        seed: int,
        cpus: Sequence[int] | None,
        speculation: SpeculationConfig | None,
        device: DeviceKind,
    ) -> int:
        """Returns the process id, so that a test can kill it."""
        from paceline.rollout.engine import VllmEngine

        require(device, config.tensor_parallel_size)

        def begin(config: EngineConfig, speculation: SpeculationConfig | None) -> Awaitable[VllmEngine]:
            return VllmEngine.start(name, model_path, config, seed=seed, cpus=cpus, speculation=speculation)

        self._begin = begin
        self._restarting = False
        self._engine = await begin(config, speculation)
        self._collecting: asyncio.Task[Sequence[Rollout]] | None = None
        return os.getpid()

    async def restart(self, config: EngineConfig, speculation: SpeculationConfig | None) -> None:
        """Replace an idle engine by another, which has the weights of the checkpoint: a push has to follow. That also
        finds an engine lost that did not start, unless it is restarted before."""
        self._restarting = True
        await self._engine.close()
        self._engine = await self._begin(config, speculation)
        self._restarting = False

    async def submit(self, requests: Sequence[RolloutRequest]) -> None:
        await self._engine.submit(requests)

    async def abort(self, ids: Sequence[RolloutId]) -> None:
        await self._engine.abort(ids)

    async def collect(self, wait_s: float) -> Sequence[Rollout]:
        # The task outlives a poll that found nothing: cancelling it could drop rollouts that it had just taken.
        self._collecting = self._collecting or asyncio.create_task(_as_list(self._engine.collect()))
        done, _ = await asyncio.wait({self._collecting}, timeout=wait_s)
        if not done:
            return []
        task, self._collecting = self._collecting, None
        return task.result()

    async def receive(self, push: Push) -> Receipt:
        return await self._engine.receive(push)

    async def join_group(self, address: GroupAddress, first_rank: int) -> str | None:
        """Make the engine's workers members of the sender's process group; returns why it failed."""
        return await join(self._engine, address, first_rank)

    async def heartbeat(self) -> None:
        if not self._restarting:  # which has a deadline of its own, as the push that follows it
            await self._engine.heartbeat()

    async def clock(self) -> tuple[str, float]:
        """The machine that this actor runs on, and the time on its monotonic clock."""
        return this_machine(), time.monotonic()

    async def call(self, method: str) -> Any:
        """pause, resume, sleep, wake, metrics, take_timeline, stop_speculation, close."""
        return await {
            "pause": self._engine.pause,
            "resume": self._engine.resume,
            "sleep": self._engine.sleep,
            "wake": self._engine.wake,
            "metrics": self._engine.metrics,
            "take_timeline": self._engine.take_timeline,
            "close": self._engine.close,
            "stop_speculation": partial(self._engine.set_draft_limit, 0),
        }[method]()

    async def trainer_start(self, settings: WorkerSettings) -> int:
        """Start the drafter-training process beside this engine, as a child with its cores or GPU; returns its id."""
        try:
            self._trainer = TrainerProcess(settings)
        except OSError as error:  # which would say of an engine that it is lost
            raise PacelineError(f"no process for drafter training: {error}") from error
        return self._trainer.pid

    async def trainer_ready(self, wait_s: float) -> None:
        """Wait until it could train; one that hangs at its start is ended."""
        trainer = self._trainer
        try:
            await asyncio.wait_for(asyncio.to_thread(trainer.wait_ready), wait_s)
        except TimeoutError:
            await asyncio.to_thread(trainer.kill)

    # Not in threads, which may change the order of a lease and its recall.
    async def trainer_lease(self) -> float:
        return self._trainer.lease()

    async def trainer_recall(self) -> None:
        self._trainer.recall()

    async def trainer_kill(self) -> None:
        await asyncio.to_thread(self._trainer.kill)

    async def trainer_ended(self, wait_s: float) -> int | None:
        """Its exit code; None if it lives on for this long."""
        trainer, until_s = self._trainer, time.monotonic() + wait_s
        while trainer.ended() is None and time.monotonic() < until_s:
            await asyncio.sleep(_LOOK_S)
        return trainer.ended()


class LearnerActor:
    """One rank of the learner; rank 0 also sends its weights."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._store: Store | None = None

    def rendezvous(self, timeout_s: float) -> tuple[str, int]:
        """Open the store at which the ranks find each other; asked of rank 0."""
        host = ray.util.get_node_ip_address()
        self._store = store = host_store(host, timeout_s)
        return host, store.port

    def start(
        self,
        model_path: str,
        config: LearnerConfig,
        objective: ObjectiveConfig,
        temperature: float,
        seed: int,
        rendezvous: tuple[str, int] | None,
        engine: EngineConfig,
        num_threads: int | None,
        cores: Sequence[int] | None,
        hand_over: HiddenStateWriterSettings | None,
        device: DeviceKind,
        transport: Transport,
    ) -> None:
        if cores is not None:
            os.sched_setaffinity(0, cores)
        if rendezvous is not None and self._store is None:
            self._store = join_store(*rendezvous, config.deadline_s)
        self._learner = FsdpLearner(
            model_path,
            config,
            objective,
            temperature=temperature,
            seed=seed,
            rank=self._rank,
            store=self._store,
            num_threads=num_threads,
            device=device,
        )
        if engine.weights == "fp8" and (untrained := min(self._learner.untrained, default=None)) is not None:
            raise PacelineError(
                f"rollout.engine.weights: got 'fp8' with {model_path}, whose {untrained} is no part of what is trained "
                "(MTP heads?); must be 'full' because it is not known here what engines make of such tensors in FP8"
            )
        self._wire_dtype = getattr(torch, engine.dtype)
        self._engine = engine
        self._sender = _open_sender(transport, device) if self._rank == 0 else None
        self._hand_over = (
            None if hand_over is None else HiddenStateWriter(self._learner, hand_over, rank=self._rank, seed=seed)
        )

    def host_group(self, num_workers: int, timeout_s: float) -> GroupAddress | None:
        """Open a process group for the bytes of pushes; only rank 0 answers, and only over the distributed
        transport."""
        if not isinstance(self._sender, DistributedSender):
            return None
        return self._sender.host(ray.util.get_node_ip_address(), num_workers, timeout_s)

    def join_group(self) -> str | None:
        """Wait for the engines' workers in the group; returns why they did not all come."""
        return self._attempt(lambda sender: sender.join())

    def transmit(self) -> str | None:
        """Broadcast what was staged last, if it goes by broadcast; returns why it failed."""
        return self._attempt(lambda sender: sender.transmit())

    def _attempt(self, call: Callable[[DistributedSender], None]) -> str | None:
        if not isinstance(self._sender, DistributedSender):
            return None
        try:
            call(self._sender)
        except (PacelineError, RuntimeError) as error:  # torch.distributed raises subclasses of RuntimeError
            return str(error)
        return None

    def score(self, samples: Sequence[Sample], correction: CorrectionConfig | None, hand_over: bool) -> Scores:
        if self._hand_over is not None and hand_over:
            scores = self._hand_over.score(samples, correction)
        else:
            scores = self._learner.score(samples, correction=correction)
        return Scores(logp=scores.logp, pending=scores.pending)

    def apply(self, samples: Sequence[Sample], pending: PendingGradients | None) -> Mapping[str, float]:
        return self._learner.apply(samples, pending)

    def discard(self) -> None:
        self._learner.discard()

    def calibrate(self, samples: Sequence[Sample], version: int) -> Mapping[str, float]:
        return self._learner.calibrate(samples, version)

    def stage_for(self, engine: EngineConfig) -> None:
        """From now on for engines of this precision."""
        self._engine = engine

    def stage(self, version: int) -> Push | None:
        """Stage the policy; every rank takes part in gathering it, rank 0 sends."""
        weights = self._learner.weights(self._wire_dtype)
        if self._sender is not None:
            scales = self._learner.kv_scales if self._engine.kv_cache == "fp8" else None
            return self._sender.stage(
                version,
                weights,
                quantised=self._engine.weights == "fp8",
                sharding=Sharding(self._engine.tensor_parallel_size, self._learner.num_kv_heads),
                kv_scales=scales,
            )
        deque(weights, maxlen=0)  # gathering is collective: this rank takes every tensor and drops it
        return None

    def stage_drafter(self, checkpoint: str, file: str, version: int) -> Push | None:
        """Stage a drafter, on rank 0: its checkpoint with the trained tensors of `file` in it."""
        if self._sender is None:
            return None
        weights = drafter_weights(Path(checkpoint)) | drafter_weights(Path(file))
        wire = ((name, w.to(self._wire_dtype) if w.is_floating_point() else w) for name, w in weights.items())
        return self._sender.stage(version, wire, target="drafter")

    def counters(self) -> Mapping[str, float]:
        return {} if self._hand_over is None else self._hand_over.counters()

    def save(self, path: str) -> None:
        self._learner.save(path)

    def save_state(self, path: str) -> None:
        if self._rank == 0 and Path(path).exists():  # of a learner that was lost while it wrote
            remove_directory(Path(path))
        self._learner.save_state(path)

    def load_state(self, path: str) -> None:
        self._learner.load_state(path)

    def close(self) -> None:
        self._learner.close()
        if self._sender is not None:
            self._sender.close()


async def _as_list(rollouts: Awaitable[Sequence[Rollout]]) -> list[Rollout]:
    return list(await rollouts)


def _open_sender(transport: Transport, device: DeviceKind) -> ShmSender | DistributedSender:
    return ShmSender() if transport == "shared_memory" else DistributedSender(use_device(kind=device))
