"""Ray actors: one process per engine and per learner rank."""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import ray
import torch
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]  public in its docs

from paceline.cluster.clock import this_machine
from paceline.cluster.specs import EngineSpec, LearnerRankSpec
from paceline.config import CorrectionConfig, EngineConfig
from paceline.devices import Transport, require, use_device
from paceline.drafters.rounds import drafter_weights
from paceline.drafters.worker import TrainerProcess, WorkerSettings
from paceline.files import remove_directory
from paceline.fp8 import Sharding
from paceline.learner.fsdp import FsdpLearner
from paceline.learner.hidden_states import HiddenStateWriter
from paceline.types import (
    DeviceKind,
    DraftBin,
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

if TYPE_CHECKING:
    from paceline.rollout.engine import VllmEngine

_ALIVE_CHECK_S = 0.1
"""Interval of the check that the drafter trainer is alive."""


class EngineActor:
    """Process of one engine."""

    async def start(self, spec: EngineSpec) -> int:
        require(spec.device, spec.settings.engine.tensor_parallel_size)
        self._restarting = False
        self._engine = await _start_engine(spec)
        self._collecting: asyncio.Task[Sequence[Rollout]] | None = None
        return os.getpid()

    async def restart(self, spec: EngineSpec) -> None:
        """Replace an idle engine. The new one has the checkpoint's weights and needs a push.

        After a failure the engine counts as lost unless it is restarted again.
        """
        self._restarting = True
        await self._engine.close()
        self._engine = await _start_engine(spec)
        self._restarting = False

    async def submit(self, requests: Sequence[RolloutRequest]) -> None:
        await self._engine.submit(requests)

    async def abort(self, ids: Sequence[RolloutId]) -> None:
        await self._engine.abort(ids)

    async def collect(self, wait_s: float) -> Sequence[Rollout]:
        # The task outlives an empty poll: cancelling it could drop rollouts that it has just taken.
        self._collecting = self._collecting or asyncio.create_task(_as_list(self._engine.collect()))
        done, _ = await asyncio.wait({self._collecting}, timeout=wait_s)
        if not done:
            return []
        task, self._collecting = self._collecting, None
        return task.result()

    async def receive(self, push: Push) -> Receipt:
        return await self._engine.receive(push)

    async def join_group(self, address: GroupAddress, first_rank: int) -> str | None:
        """Add the engine's workers to the sender's process group. Return the error, or None."""
        return await join(self._engine, address, first_rank)

    async def heartbeat(self) -> None:
        if not self._restarting:  # a restart has its own deadline
            await self._engine.heartbeat()

    async def clock(self) -> tuple[str, float]:
        """Return the machine of this actor and the time of its monotonic clock."""
        return this_machine(), time.monotonic()

    async def pause(self) -> None:
        await self._engine.pause()

    async def resume(self) -> None:
        await self._engine.resume()

    async def sleep(self) -> None:
        await self._engine.sleep()

    async def wake(self) -> None:
        await self._engine.wake()

    async def stop_speculation(self) -> None:
        await self._engine.set_draft_limit(0)

    async def metrics(self) -> Mapping[str, float]:
        return await self._engine.metrics()

    async def take_timeline(self) -> Sequence[DraftBin]:
        return await self._engine.take_timeline()

    async def close(self) -> None:
        await self._engine.close()

    async def trainer_start(self, settings: WorkerSettings) -> int:
        """Start drafter training as a child process on the engine's cores or GPU. Return its process id."""
        try:
            self._trainer = TrainerProcess(settings)
        except OSError as error:  # an OSError would mark the engine as lost
            raise PacelineError(f"drafter training: the process did not start: {error}") from error
        return self._trainer.pid

    async def trainer_ready(self, wait_s: float) -> None:
        """Wait until the trainer is ready; kill it if it is not ready in time."""
        trainer = self._trainer
        try:
            await asyncio.wait_for(asyncio.to_thread(trainer.wait_ready), wait_s)
        except TimeoutError:
            await asyncio.to_thread(trainer.kill)

    # Not in threads, which could reorder a lease and its recall.
    async def trainer_lease(self) -> float:
        return self._trainer.lease()

    async def trainer_recall(self) -> None:
        self._trainer.recall()

    async def trainer_kill(self) -> None:
        await asyncio.to_thread(self._trainer.kill)

    async def trainer_ended(self, wait_s: float) -> int | None:
        """Return the exit code, or None if the trainer is still alive after this time."""
        trainer, until_s = self._trainer, time.monotonic() + wait_s
        while trainer.ended() is None and time.monotonic() < until_s:
            await asyncio.sleep(_ALIVE_CHECK_S)
        return trainer.ended()


class LearnerActor:
    """Process of one learner rank; rank 0 also sends the weights."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._store: Store | None = None

    def rendezvous(self, timeout_s: float) -> tuple[str, int]:
        """Open the store that connects the ranks, on rank 0."""
        host = ray.util.get_node_ip_address()
        self._store = store = host_store(host, timeout_s)
        return host, store.port

    def start(self, spec: LearnerRankSpec) -> None:
        if spec.cores is not None:
            os.sched_setaffinity(0, spec.cores)
        if spec.rendezvous is not None and self._store is None:
            self._store = join_store(*spec.rendezvous, spec.learner.deadline_s)
        self._learner = FsdpLearner(
            spec.model_path,
            spec.learner,
            spec.objective,
            temperature=spec.temperature,
            seed=spec.seed,
            rank=self._rank,
            store=self._store,
            num_threads=spec.num_threads,
            device=spec.device,
        )
        self._engine = spec.engine
        if spec.engine.weights == "fp8" and (untrained := min(self._learner.untrained, default=None)) is not None:
            raise PacelineError(
                f"rollout.engine.weights: got 'fp8' with {spec.model_path}, whose tensor {untrained} is not trained "
                "(MTP heads?); must be 'full' because vLLM's FP8 form of untrained tensors is unknown here"
            )
        self._wire_dtype = getattr(torch, spec.engine.dtype)
        self._sender = _open_sender(spec.transport, spec.device) if self._rank == 0 else None
        self._hand_over = None
        if spec.hand_over is not None:
            self._hand_over = HiddenStateWriter(self._learner, spec.hand_over, rank=self._rank, seed=spec.seed)

    def host_group(self, num_workers: int, timeout_s: float) -> GroupAddress | None:
        """Open the process group for weight pushes. Return None unless rank 0 uses the distributed transport."""
        if not isinstance(self._sender, DistributedSender):
            return None
        return self._sender.host(ray.util.get_node_ip_address(), num_workers, timeout_s)

    def join_group(self) -> str | None:
        """Wait for the engines' workers in the process group. Return the error, or None."""
        return self._attempt(lambda sender: sender.join())

    def transmit(self) -> str | None:
        """Broadcast the staged weights over the distributed transport. Return the error, or None."""
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
        """Stage the following pushes for engines with this config."""
        self._engine = engine

    def stage(self, version: int) -> Push | None:
        """Gather the policy on every rank and stage it on rank 0."""
        weights = self._learner.weights(self._wire_dtype)
        if self._sender is not None:
            scales = self._learner.kv_scales if self._engine.kv_cache == "fp8" else None
            return self._sender.stage(
                version,
                weights,
                quantized=self._engine.weights == "fp8",
                sharding=Sharding(self._engine.tensor_parallel_size, self._learner.num_kv_heads),
                kv_scales=scales,
            )
        deque(weights, maxlen=0)  # gathering is collective
        return None

    def stage_drafter(self, checkpoint: str, file: str, version: int) -> Push | None:
        """Stage the drafter checkpoint, updated with the trained tensors of `file`, on rank 0."""
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
        if self._rank == 0 and Path(path).exists():  # left by a learner that failed while writing
            remove_directory(Path(path))
        self._learner.save_state(path)

    def load_state(self, path: str) -> None:
        self._learner.load_state(path)

    def close(self) -> None:
        self._learner.close()
        if self._sender is not None:
            self._sender.close()


def _start_engine(spec: EngineSpec) -> Awaitable[VllmEngine]:
    from paceline.rollout.engine import VllmEngine

    config, speculation = spec.settings.engine, spec.settings.speculation
    return VllmEngine.start(
        spec.name, spec.model_path, config, seed=spec.seed, cpus=spec.cores, speculation=speculation
    )


async def _as_list(rollouts: Awaitable[Sequence[Rollout]]) -> list[Rollout]:
    return list(await rollouts)


def _open_sender(transport: Transport, device: DeviceKind) -> ShmSender | DistributedSender:
    return ShmSender() if transport == "shared_memory" else DistributedSender(use_device(kind=device))
