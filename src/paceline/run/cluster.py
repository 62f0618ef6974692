"""Engines and learner as Ray actors: the processes of a run, where they stand and how they end. The only file that imports ray.

    driver (loop.py) ── RemoteEngine ──▶ EngineActor x num_engines ── VllmEngine ── vLLM's own processes
                     ── RemoteLearner ─▶ LearnerActor x world_size ── FsdpLearner
                     ── RemoteSender ──▶ LearnerActor.stage ──push──▶ EngineActor.receive       on the CPU
                     ── NcclSender ────▶ LearnerActor.broadcast ═══▶ EngineActor.transfer       on GPUs, not yet run on one
                     ── RemoteTrainer ─▶ EngineActor.trainer_… ── TrainerProcess                beside each engine, on its cores

Every call to an actor has a deadline, because Ray calls a stopped process alive. Actors die with the driver, vLLM's processes die
with their actor, and a Ray that was started here dies with the driver too, so that neither Ctrl-C nor a crash leaves anything.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import ray
import torch
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from paceline.config import Config, EngineConfig, LearnedDrafter, LearnerConfig, ObjectiveConfig, SpeculationConfig
from paceline.draft.checkpoint import read_taps, with_own_ends
from paceline.draft.exchange import drafter_weights
from paceline.draft.worker import TrainerProcess, WorkerSettings, documents_in
from paceline.policy.learner import FsdpLearner
from paceline.policy.teacher import HandOver, HandOverSettings
from paceline.rollout.transfer import Push, ShmSender, mismatched, take_part
from paceline.run import reaper
from paceline.run.coach import Coach
from paceline.types import EngineLostError, Floats, PacelineError, Receipt, Rollout, RolloutRequest, Sample, Sender

T = TypeVar("T")

_POLL_S = 10.0
"""An engine answers `collect` at least this often, with nothing if nothing has finished: silence means that it is lost."""
_LOOK_S = 0.1
"""How often an engine's actor looks whether the trainer beside it lives."""
_CLOSE_DEADLINE_S = 8.0
_ABANDON_DEADLINE_S = 1.0
"""An interrupted run does not wait for farewells; what has not said one by then is killed."""


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
    ) -> int:
        """Returns the process id, so that a test can kill it."""
        from paceline.rollout.engine import VllmEngine

        def begin(config: EngineConfig) -> Awaitable[VllmEngine]:
            return VllmEngine.start(name, model_path, config, seed=seed, cpus=cpus, speculation=speculation)

        self._begin = begin
        self._engine = await begin(config)
        self._collecting: asyncio.Task[Sequence[Rollout]] | None = None
        return os.getpid()

    async def restart(self, config: EngineConfig) -> None:
        """Another engine in the place of an idle one, with the weights of the checkpoint: a push has to follow."""
        await self._engine.close()
        self._engine = await self._begin(config)

    async def submit(self, requests: Sequence[RolloutRequest]) -> None:
        await self._engine.submit(requests)

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

    async def transfer(self, method: str, *args: Any) -> list[Any]:
        """One call of vLLM's weight-transfer lifecycle on every worker."""
        return await self._engine.rpc(method, *args)

    async def adopt(self, version: int) -> None:
        """Go on with weights that vLLM's own backend has brought."""
        await self._engine.on_new_weights(version)
        await self._engine.resume()

    async def call(self, method: str) -> Mapping[str, float] | None:
        """pause, resume, sleep, wake, metrics, close."""
        return await {
            "pause": self._engine.pause,
            "resume": self._engine.resume,
            "sleep": self._engine.sleep,
            "wake": self._engine.wake,
            "metrics": self._engine.metrics,
            "close": self._engine.close,
            "stop_speculation": self._engine.stop_speculation,
        }[method]()

    async def trainer_start(self, settings: WorkerSettings) -> int:
        """Start the training process of this place; a child of this one, with its cores or GPU. Returns its process id."""
        self._trainer = TrainerProcess(settings)
        return self._trainer.pid

    async def trainer_ready(self) -> bool:
        return await asyncio.to_thread(self._trainer.wait_ready)

    async def trainer_call(self, method: str) -> None:
        """lease, recall, kill."""
        trainer = self._trainer
        await asyncio.to_thread({"lease": trainer.lease, "recall": trainer.recall, "kill": trainer.kill}[method])

    async def trainer_ended(self, wait_s: float) -> int | None:
        """Its exit code; None if it lives on for this long."""
        trainer, until_s = self._trainer, time.monotonic() + wait_s
        while trainer.ended() is None and time.monotonic() < until_s:
            await asyncio.sleep(_LOOK_S)
        return trainer.ended()


class LearnerActor:
    """One rank of the learner, with the sending end of the weight wire beside it."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def meeting_place(self) -> str:
        """Where the ranks meet; asked of rank 0."""
        address = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"tcp://{address}:{probe.getsockname()[1]}"

    def start(
        self,
        model_path: str,
        config: LearnerConfig,
        objective: ObjectiveConfig,
        temperature: float,
        seed: int,
        meeting_place: str | None,
        engine: EngineConfig,
        num_threads: int | None,
        cores: Sequence[int] | None,
        hand_over: HandOverSettings | None,
    ) -> None:
        if cores is not None:
            os.sched_setaffinity(0, cores)
        self._learner = FsdpLearner(
            model_path,
            config,
            objective,
            temperature=temperature,
            seed=seed,
            rank=self._rank,
            init_method=meeting_place,
            num_threads=num_threads,
        )
        self._wire_dtype = getattr(torch, engine.dtype)
        self._engine = engine
        self._sender = ShmSender() if self._rank == 0 and not torch.cuda.is_available() else None
        self._hand_over = None if hand_over is None else HandOver(self._learner, hand_over, rank=self._rank, seed=seed)

    def logp(self, samples: Sequence[Sample], hand_over: bool) -> Sequence[Floats]:
        if self._hand_over is None or not hand_over:
            return self._learner.logp(samples).logp
        return self._hand_over.logp(samples)

    def update(self, samples: Sequence[Sample]) -> Mapping[str, float]:
        return self._learner.update(samples)

    def calibrate(self, samples: Sequence[Sample], version: int) -> Mapping[str, float]:
        return self._learner.calibrate(samples, version)

    def stage_for(self, engine: EngineConfig) -> None:
        """From now on for engines of this precision."""
        self._engine = engine

    def stage(self, version: int) -> Push | None:
        """Put the policy onto the wire; every rank takes part in gathering it, rank 0 sends."""
        weights = self._learner.weights(self._wire_dtype)
        if self._sender is not None:
            scales = self._learner.kv_scales if self._engine.kv_cache == "fp8" else None
            return self._sender.stage(version, weights, quantised=self._engine.weights == "fp8", kv_scales=scales)
        take_part(weights)
        return None

    def stage_drafter(self, checkpoint: str, file: str, version: int) -> Push | None:
        """Put a drafter onto the wire, where there is one here: its checkpoint with the trained tensors of `file` in it."""
        if self._sender is None:
            return None
        weights = drafter_weights(Path(checkpoint)) | drafter_weights(Path(file))
        wire = ((name, w.to(self._wire_dtype) if w.is_floating_point() else w) for name, w in weights.items())
        return self._sender.stage(version, wire, target="drafter")

    def open_nccl(self, engines: Sequence[Any], workers_per_engine: int, meeting_place: str) -> None:
        """Join the engines' workers in one NCCL group with rank 0 as the sender. Not yet run on a GPU."""
        from paceline.rollout.backends import GpuSender, nccl_wire

        address, port = meeting_place.removeprefix("tcp://").rsplit(":", 1)
        self._nccl: GpuSender = nccl_wire(
            rank=self._rank,
            address=address,
            port=int(port),
            num_workers=len(engines) * workers_per_engine,
            client=_EngineClient(engines, workers_per_engine),
            weights=lambda: self._learner.weights(self._wire_dtype),
            specs=[(spec.name, spec.dtype, spec.shape) for spec in self._learner.weight_metadata(self._wire_dtype)],
        )

    def broadcast(self) -> Mapping[str, str]:
        """Send the policy to every worker at once; returns the fingerprints of what was sent."""
        return self._nccl.send()

    def save(self, path: str) -> None:
        self._learner.save(path)

    def close(self) -> None:
        self._learner.close()
        if self._sender is not None:
            self._sender.close()


class RemoteEngine:
    """types.Engine over an EngineActor."""

    def __init__(self, name: str, actor: Any, config: EngineConfig) -> None:
        self.name = name
        self.actor = actor
        self.pid = 0
        self._config = config

    async def start(
        self, model_path: str, seed: int, cpus: Sequence[int] | None, speculation: SpeculationConfig | None = None
    ) -> None:
        starting = self.actor.start.remote(self.name, model_path, self._config, seed, cpus, speculation)
        self.pid = await self._answer("start", starting, self._config.start_deadline_s + self._config.call_deadline_s)

    async def restart(self, config: EngineConfig) -> None:
        self._config = config
        await self._answer("restart", self.actor.restart.remote(config), config.start_deadline_s + config.call_deadline_s)

    async def submit(self, requests: Sequence[RolloutRequest]) -> None:
        await self._answer("submit", self.actor.submit.remote(list(requests)))

    async def collect(self) -> Sequence[Rollout]:
        while True:
            rollouts = await self._answer("collect", self.actor.collect.remote(_POLL_S), _POLL_S + self._config.call_deadline_s)
            if rollouts:
                return rollouts

    async def receive(self, push: Push) -> Receipt:
        """Like all of types.Engine it raises when the engine is gone; a push that was refused is in the receipt."""
        return await self._answer("receive", self.actor.receive.remote(push), 5 * self._config.call_deadline_s)

    async def held_fingerprints(self) -> list[Mapping[str, str]]:
        """Of the policy, by worker."""
        reports = await self._answer("applied_fingerprints", self.actor.transfer.remote("applied_fingerprints"))
        return [report["policy"]["fingerprints"] for report in reports]

    async def adopt(self, version: int) -> None:
        await self._answer("adopt", self.actor.adopt.remote(version))

    async def pause(self) -> None:
        await self._answer("pause", self.actor.call.remote("pause"))

    async def resume(self) -> None:
        await self._answer("resume", self.actor.call.remote("resume"))

    async def sleep(self) -> None:
        await self._answer("sleep", self.actor.call.remote("sleep"))

    async def wake(self) -> None:
        await self._answer("wake", self.actor.call.remote("wake"))

    async def stop_speculation(self) -> None:
        await self._answer("stop_speculation", self.actor.call.remote("stop_speculation"))

    async def trainer_start(self, settings: WorkerSettings) -> int:
        return await self._answer("trainer_start", self.actor.trainer_start.remote(settings))

    async def trainer_ready(self) -> bool:
        return await self._answer("trainer_ready", self.actor.trainer_ready.remote(), self._config.start_deadline_s)

    async def trainer_call(self, method: str) -> None:
        await self._answer(method, self.actor.trainer_call.remote(method))

    async def trainer_ended(self) -> int:
        while True:
            answer = self.actor.trainer_ended.remote(_POLL_S)
            code = await self._answer("trainer_ended", answer, _POLL_S + self._config.call_deadline_s)
            if code is not None:
                return code

    async def metrics(self) -> Mapping[str, float]:
        return await self._answer("metrics", self.actor.call.remote("metrics"))

    async def close(self, deadline_s: float = _CLOSE_DEADLINE_S) -> None:
        with suppress(PacelineError):  # it is killed next in either case
            await self._answer("close", self.actor.call.remote("close"), deadline_s)
        ray.kill(self.actor)

    async def _answer(self, what: str, answer: Awaitable[T], deadline_s: float | None = None) -> T:
        deadline_s = deadline_s or self._config.call_deadline_s
        try:
            return await asyncio.wait_for(_plain(answer), deadline_s)
        except TimeoutError:
            raise EngineLostError(self.name, f"{what} did not answer within {deadline_s:.0f} s") from None
        except RayActorError as error:
            raise EngineLostError(self.name, f"its process ended during {what}: {_first_line(error)}") from None
        except RayError as error:
            lost = error.__cause__
            if isinstance(lost, EngineLostError):
                raise EngineLostError(self.name, lost.why) from None
            raise


class RemoteLearner:
    """types.Learner over the LearnerActors; rank 0 speaks for all."""

    def __init__(self, actors: Sequence[Any], config: LearnerConfig) -> None:
        self.actors = actors
        self.hands_over = True
        """Public: a bench holds back what drafter training takes from the log-probability pass."""
        self._config = config

    async def start(
        self,
        model_path: str,
        config: Config,
        num_threads: int | None,
        cores: Sequence[int] | None = None,
        hand_over: HandOverSettings | None = None,
    ) -> None:
        meeting_place = await _plain(self.actors[0].meeting_place.remote()) if len(self.actors) > 1 else None
        await self._all(
            "start",
            model_path,
            config.learner,
            config.objective,
            config.rollout.temperature,
            config.run.seed,
            meeting_place,
            config.rollout.engine,
            num_threads,
            cores,
            hand_over,
        )

    async def logp(self, samples: Sequence[Sample]) -> Sequence[Floats]:
        return await self._all("logp", list(samples), self.hands_over)

    async def logp_again(self, samples: Sequence[Sample]) -> Sequence[Floats]:
        return await self._all("logp", list(samples), False)

    async def update(self, samples: Sequence[Sample]) -> Mapping[str, float]:
        return await self._all("update", list(samples))

    async def calibrate(self, samples: Sequence[Sample], version: int) -> Mapping[str, float]:
        return await self._all("calibrate", list(samples), version)

    async def stage_for(self, engine: EngineConfig) -> None:
        await self._all("stage_for", engine)

    async def stage(self, version: int) -> Push:
        return await self._all("stage", version)

    async def stage_drafter(self, checkpoint: Path, file: Path, version: int) -> Push:
        return await self._all("stage_drafter", str(checkpoint), str(file), version)

    async def open_nccl(self, engines: Sequence[RemoteEngine], workers_per_engine: int) -> None:
        meeting_place = await _plain(self.actors[0].meeting_place.remote())
        await self._all("open_nccl", [engine.actor for engine in engines], workers_per_engine, meeting_place)

    async def broadcast(self) -> Mapping[str, str]:
        return await self._all("broadcast")

    async def save(self, path: str) -> None:
        await self._all("save", path)

    async def close(self, deadline_s: float = _CLOSE_DEADLINE_S) -> None:
        with suppress(TimeoutError, PacelineError):  # they are killed next in either case
            await asyncio.wait_for(self._all("close"), deadline_s)
        for actor in self.actors:
            ray.kill(actor)

    async def _all(self, method: str, *args: Any) -> Any:
        """Call every rank with the same arguments, each of them shipped once per node."""
        shared = [ray.put(arg) for arg in args]
        answers = [_plain(getattr(actor, method).remote(*shared)) for actor in self.actors]
        try:
            return (await asyncio.wait_for(asyncio.gather(*answers), self._config.deadline_s))[0]
        except TimeoutError:
            raise PacelineError(
                f"the learner did not answer {method} within {self._config.deadline_s:.0f} s; "
                "raise learner.deadline_s if it is only slow"
            ) from None
        except RayActorError as error:
            raise PacelineError(f"a learner process ended during {method}: {_first_line(error)}") from None


class RemoteSender:
    """types.Sender: the learner stages a version once, and all engines take it at the same time."""

    def __init__(self, learner: RemoteLearner, engines: Sequence[RemoteEngine], drafter: Path | None = None) -> None:
        """`drafter` is the checkpoint of the engines' drafter, if it is to be trained."""
        self._learner = learner
        self._engines = list(engines)
        self._drafter = drafter

    async def send(self, version: int) -> Sequence[Receipt]:
        return await self._deliver_all(await self._learner.stage(version))

    async def send_drafter(self, file: Path, version: int) -> Sequence[Receipt]:
        assert self._drafter is not None
        return await self._deliver_all(await self._learner.stage_drafter(self._drafter / "model.safetensors", file, version))

    async def stop_speculation(self) -> None:
        await asyncio.gather(*(engine.stop_speculation() for engine in self._engines), return_exceptions=True)

    async def _deliver_all(self, push: Push) -> Sequence[Receipt]:
        receipts = await asyncio.gather(*(self._deliver(engine, push) for engine in self._engines))
        lost = {receipt.engine for receipt in receipts if receipt.lost}
        self._engines = [engine for engine in self._engines if engine.name not in lost]
        return receipts

    async def _deliver(self, engine: RemoteEngine, push: Push) -> Receipt:
        try:
            return await engine.receive(push)
        except EngineLostError as lost:
            return Receipt(
                engine=engine.name, version=push.version, num_tensors=0, num_bytes=0, seconds=0.0, error=lost.why, lost=True
            )


class RemoteTrainer:
    """coach.Trainer over an EngineActor, whose child the training process is."""

    def __init__(self, engine: RemoteEngine, settings: WorkerSettings) -> None:
        self._engine = engine
        self._settings = settings
        self.pid = 0

    async def start(self) -> None:
        self.pid = await self._engine.trainer_start(self._settings)

    async def ready(self) -> bool:
        return await self._engine.trainer_ready()

    async def lease(self) -> None:
        await self._engine.trainer_call("lease")

    async def recall(self) -> None:
        await self._engine.trainer_call("recall")

    async def kill(self) -> None:
        await self._engine.trainer_call("kill")

    async def ended(self) -> str:
        return f"exit code {await self._engine.trainer_ended()}"


class _EngineClient:
    """vLLM's VLLMWeightSyncClient over EngineActors; lives in the learner's rank 0. Not yet run on a GPU."""

    def __init__(self, actors: Sequence[Any], workers_per_engine: int) -> None:
        self._actors = actors
        self._workers_per_engine = workers_per_engine

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """vLLM's sender counts the workers of one engine; here every engine's workers need ranks of their own."""
        offsets = [init_info["rank_offset"] + index * self._workers_per_engine for index in range(len(self._actors))]
        infos = [{**init_info, "rank_offset": offset} for offset in offsets]
        ray.get([a.transfer.remote("init_weight_transfer_engine", info) for a, info in zip(self._actors, infos, strict=True)])

    def start_weight_update(self) -> None:
        ray.get([actor.call.remote("pause") for actor in self._actors])
        ray.get([actor.transfer.remote("start_weight_update") for actor in self._actors])

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        ray.get([actor.transfer.remote("update_weights", update_info) for actor in self._actors])

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        ray.get([actor.transfer.remote("finish_weight_update") for actor in self._actors])


class NcclSender:
    """types.Sender over vLLM's NCCL backend. Not yet run on a GPU.

    One broadcast reaches all engines, so an engine that dies in it takes the group along: the learner's deadline ends the run.
    """

    def __init__(self, learner: RemoteLearner, engines: Sequence[RemoteEngine]) -> None:
        self._learner = learner
        self._engines = engines

    async def send(self, version: int) -> Sequence[Receipt]:
        began_s = time.monotonic()
        sent = await self._learner.broadcast()
        return await asyncio.gather(*(self._confirm(engine, version, sent, began_s) for engine in self._engines))

    async def _confirm(self, engine: RemoteEngine, version: int, sent: Mapping[str, str], began_s: float) -> Receipt:
        held = await engine.held_fingerprints()
        names = tuple(sorted({name for fingerprints in held for name in mismatched(sent, fingerprints)}))
        if not names:
            await engine.adopt(version)
        error = f"{names[0]}: held with another fingerprint than the sender's" if names else None
        seconds = time.monotonic() - began_s
        return Receipt(
            engine=engine.name, version=version, num_tensors=len(sent), num_bytes=0, seconds=seconds, mismatched=names, error=error
        )


class Cluster:
    """The actors of one run."""

    def __init__(
        self,
        engines: Sequence[RemoteEngine],
        learner: RemoteLearner,
        sender: Sender,
        coach: Coach | None,
        trainers: Sequence[RemoteTrainer],
    ) -> None:
        self.engines = engines
        self.learner = learner
        self.sender = sender
        self.coach = coach
        """None where no drafter is trained."""
        self.trainers = trainers

    async def raise_precision(self, config: EngineConfig, raised: bool) -> None:
        """Start every engine again, in full precision or as configured. One that does not come back refuses the push that follows,
        which is when the fleet goes on without it."""
        chosen = config.in_full_precision if raised else config
        await self.learner.stage_for(chosen)
        await asyncio.gather(*(engine.restart(chosen) for engine in self.engines), return_exceptions=True)


@asynccontextmanager
async def start_cluster(config: Config, model_path: Path) -> AsyncIterator[Cluster]:
    """Place and start every process of a run; all of them are gone when the context ends."""
    directory = _training_directory(config)
    _check_precision(config)
    with _ray(config, directory):
        if directory is not None:
            config = _with_own_ends(config, model_path, directory)
        group = _place(config)
        engines, learner = _create_actors(config, group)
        deadline_s = _ABANDON_DEADLINE_S
        try:
            yield await _start_actors(config, model_path, engines, learner, directory)
            deadline_s = _CLOSE_DEADLINE_S
        finally:
            await asyncio.gather(*(part.close(deadline_s) for part in (*engines, learner)), return_exceptions=True)
            remove_placement_group(group)
            if directory is not None:
                shutil.rmtree(directory, ignore_errors=True)


async def _start_actors(
    config: Config, model_path: Path, engines: Sequence[RemoteEngine], learner: RemoteLearner, directory: Path | None
) -> Cluster:
    """Start engines and learner at the same time, then lay the wire between them. `directory` is for drafter training."""
    cores = sorted(os.sched_getaffinity(0))
    gpu = torch.cuda.is_available()
    shares = [None if gpu else _share(cores, index, len(engines)) for index in range(len(engines))]
    starting = [
        engine.start(str(model_path), config.run.seed * 1000 + index, shares[index], config.speculation)
        for index, engine in enumerate(engines)
    ]
    threads = None if gpu else config.learner.cpus or max(1, len(cores) // config.learner.world_size)
    learner_cores = None if gpu or config.learner.cpus is None else cores[: config.learner.cpus * config.learner.world_size]
    hand_over = None if directory is None else _hand_over(config, model_path, directory)
    await asyncio.gather(*starting, learner.start(str(model_path), config, threads, learner_cores, hand_over))
    if gpu:
        await learner.open_nccl(engines, config.rollout.engine.tensor_parallel_size)
        return Cluster(engines, learner, NcclSender(learner, engines), None, ())
    if directory is None:
        return Cluster(engines, learner, RemoteSender(learner, engines), None, ())
    speculation, checkpoint = _trained_drafter(config)
    sender = RemoteSender(learner, engines, checkpoint)
    trainers = [
        RemoteTrainer(
            engine,
            WorkerSettings(
                name=engine.name,
                drafter=checkpoint,
                directory=directory,
                max_draft_length=speculation.max_draft_length,
                training=speculation.training,
                cpus=None if share is None else tuple(share),
                seed=config.run.seed,
            ),
        )
        for engine, share in zip(engines, shares, strict=True)
    ]
    apart = [
        engine.name
        for engine, share in zip(engines, shares, strict=True)
        if share is not None and not set(share) & set(learner_cores or cores)
    ]
    coach = Coach(engines, trainers, sender, speculation, checkpoint=checkpoint, directory=directory, apart=apart)
    return Cluster(engines, learner, sender, coach, trainers)


def _training_directory(config: Config) -> Path | None:
    """A folder of this run's own for what learner and trainers share; None if no drafter is trained."""
    if config.speculation is None or config.speculation.training.mode == "off":
        return None
    if torch.cuda.is_available():
        raise PacelineError(
            "speculation.training.mode: must be off on GPUs because drafters are not pushed over NCCL yet; `paceline draft train` "
            "makes one before the run"
        )
    if config.speculation.drafter.kind == "dflash":
        raise PacelineError(
            "speculation.training.mode: must be off with drafter.kind dflash because vLLM's CPU backend cannot take new weights of "
            "one; eagle3 can be trained"
        )
    return config.speculation.training.buffer.directory / secrets.token_hex(8)


def _with_own_ends(config: Config, model_path: Path, directory: Path) -> Config:
    speculation, checkpoint = _trained_drafter(config)
    dtype = getattr(torch, config.rollout.engine.dtype)
    path = with_own_ends(checkpoint, directory / "drafter", model_path=model_path, dtype=dtype)
    drafter = speculation.drafter.model_copy(update={"path": str(path)})
    return config.model_copy(update={"speculation": speculation.model_copy(update={"drafter": drafter})})


def _check_precision(config: Config) -> None:
    for name in ("weights", "kv_cache"):
        if torch.cuda.is_available() and getattr(config.rollout.engine, name) == "fp8":
            raise PacelineError(
                f"rollout.engine.{name}: must be full on GPUs because KV scales and fingerprints of the reference do not go over "
                "NCCL yet, and an engine in FP8 is not used unchecked"
            )


def _trained_drafter(config: Config) -> tuple[SpeculationConfig, Path]:
    speculation = config.speculation
    assert speculation is not None and isinstance(speculation.drafter, LearnedDrafter), "the config says so"
    return speculation, Path(speculation.drafter.path)


def _hand_over(config: Config, model_path: Path, directory: Path) -> HandOverSettings:
    speculation, checkpoint = _trained_drafter(config)
    return HandOverSettings(
        directory=documents_in(directory), taps=read_taps(checkpoint, model_path), buffer=speculation.training.buffer
    )


@contextmanager
def _ray(config: Config, directory: Path | None) -> Iterator[None]:
    """Connect to a cluster, or start Ray on this machine for as long as the context lasts; `directory` goes with it."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if config.cluster.address is not None:
        ray.init(address=config.cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        try:
            yield
        finally:
            ray.shutdown()
        return
    # A laptop has fewer cores than a run has processes. Engines and learner take turns, so promising more does no harm.
    wanted = config.rollout.num_engines * config.rollout.engine.tensor_parallel_size + config.learner.world_size
    with _reaped(directory):
        ray.init(
            address="local",
            num_cpus=max(wanted, len(os.sched_getaffinity(0))),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=512 * 2**20,
            _system_config={"worker_niceness": 0},  # Ray's 15 would leave an engine what the desktop does not want
        )
        try:
            yield
        finally:
            ray.shutdown()


@contextmanager
def _reaped(directory: Path | None) -> Iterator[None]:
    """What is started inside ends with the context, or with this process if that comes first, and `directory` is removed."""
    mark = secrets.token_hex(8)
    os.environ[reaper.VARIABLE] = mark
    # Its standard input ends when this process does, however that happens. A session of its own: Ctrl-C is not for it.
    command = [sys.executable, "-m", reaper.__name__, mark, *([str(directory)] if directory is not None else [])]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)  # noqa: S603
    try:
        yield
    finally:
        process.communicate()
        os.environ.pop(reaper.VARIABLE)


def _place(config: Config) -> PlacementGroup:
    """One bundle per engine (all GPUs of an engine on one node), then one per learner rank."""
    gpu = torch.cuda.is_available()
    engine = {"CPU": 1.0, "GPU": float(config.rollout.engine.tensor_parallel_size)} if gpu else {"CPU": 1.0}
    rank = {"CPU": 1.0, "GPU": 1.0} if gpu else {"CPU": 1.0}
    bundles = [engine] * config.rollout.num_engines + [rank] * config.learner.world_size
    # Shared memory is the wire on the CPU, so there everything stands on one node.
    group = placement_group(bundles, strategy="PACK" if gpu else "STRICT_PACK")
    if not group.wait(60):
        remove_placement_group(group)
        raise PacelineError(f"Ray found no room for {bundles} within 60 s; lower rollout.num_engines or learner.world_size")
    return group


def _create_actors(config: Config, group: PlacementGroup) -> tuple[list[RemoteEngine], RemoteLearner]:
    gpu = torch.cuda.is_available()
    tensor_parallel_size = config.rollout.engine.tensor_parallel_size if gpu else 0

    def create(actor: type, index: int, num_gpus: int, *args: Any) -> Any:
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        options = {"num_cpus": 1, "num_gpus": num_gpus, "scheduling_strategy": strategy, "max_restarts": 0}
        return ray.remote(actor).options(**options).remote(*args)

    engines = []
    for index in range(config.rollout.num_engines):
        actor = create(EngineActor, index, tensor_parallel_size)
        engines.append(RemoteEngine(f"engine-{index}", actor, config.rollout.engine))
    ranks = [create(LearnerActor, config.rollout.num_engines + rank, int(gpu), rank) for rank in range(config.learner.world_size)]
    return engines, RemoteLearner(ranks, config.learner)


def _share(cores: Sequence[int], index: int, num_engines: int) -> list[int]:
    """Cores of one engine: a share of its own where there are enough, otherwise they take turns."""
    if num_engines >= len(cores):
        return [cores[index % len(cores)]]
    return list(cores[index * len(cores) // num_engines : (index + 1) * len(cores) // num_engines])


async def _plain(answer: Awaitable[T]) -> T:
    """Ray's futures are awaitable but no coroutines, which asyncio's combinators want."""
    return await answer


async def _as_list(rollouts: Awaitable[Sequence[Rollout]]) -> list[Rollout]:
    return list(await rollouts)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]
