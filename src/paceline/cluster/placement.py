"""Place, start and end the processes of a run: Ray, placement group, cores and devices.

    driver (loop.py) ── RemoteEngine ──▶ EngineActor x num_engines ── VllmEngine ── vLLM's own processes
                     ── RemoteLearner ─▶ LearnerActor x world_size ── FsdpLearner
                     ── RemoteSender ──▶ LearnerActor.stage ── push ──▶ EngineActor.receive
                     ── RemoteTrainer ─▶ EngineActor.trainer_… ── TrainerProcess, beside each engine, on its cores

Actors die with the driver, vLLM's processes with their actor, and a local Ray with the driver, so neither Ctrl-C nor a
crash leaves processes.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from paceline.cluster.actors import EngineActor, LearnerActor
from paceline.cluster.layout import ClusterLayout, plan
from paceline.cluster.proxies import CLOSE_DEADLINE_S, RemoteEngine, remote
from paceline.cluster.ray_session import cluster_nodes, ray_session
from paceline.cluster.remote_learner import RemoteLearner
from paceline.cluster.sender import RemoteSender
from paceline.cluster.specs import CurrentSettings, EngineSettings, EngineSpec, LearnerRankSpec
from paceline.cluster.trainers import RemoteTrainer, RoundSender
from paceline.config import Config, LearnedDrafter, SpeculationConfig
from paceline.drafters.checkpoint import read_taps, with_own_embeddings
from paceline.drafters.kinds import draft_costs, write_new_drafter
from paceline.drafters.store import FileStore
from paceline.drafters.switch import SwitchMonitor
from paceline.drafters.worker import WorkerSettings, documents_in
from paceline.files import private_directory, remove_directory
from paceline.learner.hidden_states import HiddenStateWriterSettings
from paceline.orchestrator.drafter_switch import DrafterSwitch
from paceline.orchestrator.drafter_training import OnlineDrafterTraining
from paceline.orchestrator.healing import Healing
from paceline.orchestrator.members import Members, place_of
from paceline.orchestrator.online_drafter import OnlineDrafter
from paceline.types import PacelineError, Receipt

_ABANDON_DEADLINE_S = 1.0
"""An interrupted run kills actors that have not closed within this time."""
_ROOM_DEADLINE_S = 60.0
"""Longest wait for resources held by other jobs."""


class Cluster:
    """The actors of one run; healing.Restarter and drafter_switch.DraftingEngines for its engines."""

    def __init__(
        self,
        starter: EngineStarter,
        learner: RemoteLearner,
        sender: RemoteSender,
        members: Members,
        settings: CurrentSettings,
        *,
        max_restarts: int,
    ) -> None:
        self._starter = starter
        self.settings = settings
        self.learner = learner
        self.sender = sender
        self.members = members
        self.drafter: OnlineDrafter = OnlineDrafter()
        self.trainers: Sequence[RemoteTrainer] = ()
        self.healer = Healing(members, self, max_restarts=max_restarts)

    @property
    def engines(self) -> list[RemoteEngine]:
        """The newest engine of every place."""
        return [self._newest(place) for place in self.members.places]

    def _newest(self, name: str) -> RemoteEngine:
        return remote(self.members.newest(place_of(name)))

    async def beat(self, name: str) -> None:
        await self._newest(name).heartbeat()

    async def start(self, name: str) -> None:
        await self._newest(name).close()  # its process holds the resources of the new one
        engine = self._starter.create(name)
        self.members.register(engine)
        try:
            await engine.start()
        except BaseException:
            ray.kill(engine.actor)
            raise

    async def catch_up(self, name: str) -> Receipt:
        return await self.sender.catch_up(self._newest(name))

    async def raise_precision(self, raised: bool) -> None:
        """Restart all engines in full or in configured precision. The next push loses engines that do not return."""
        await self._restart(self.settings.with_precision(raised=raised))

    async def stop_speculation(self, name: str) -> None:
        """Let one engine draft no more until it restarts."""
        if (engine := self._newest(name)).name == name:
            await engine.stop_speculation()

    @property
    def start_s(self) -> float:
        return max(engine.start_s for engine in self.engines)

    async def draft_with(self, *, learned: bool) -> None:
        if failures := await self._restart(self.settings.with_drafter(learned=learned)):
            why = failures[0].cause if isinstance(failures[0], RayTaskError) else failures[0]
            raise PacelineError(f"{len(failures)} of {len(self.members.names)} engines did not start: {why}")

    async def _restart(self, settings: EngineSettings) -> list[BaseException]:
        """Restart all live engines with these settings and return their errors. Engines that start meanwhile wait for
        the next push, and start again if their settings differ."""
        await self.learner.change_settings(settings)
        alive = [remote(engine) for engine in self.members.engines]
        answers = await asyncio.gather(*(engine.restart(settings) for engine in alive), return_exceptions=True)
        self.sender.drop_group()
        return [answer for answer in answers if answer is not None]


class EngineStarter:
    """Creates the engines of each place in the bundle of the place."""

    def __init__(
        self,
        config: Config,
        layout: ClusterLayout,
        group: PlacementGroup,
        model_path: Path,
        settings: CurrentSettings,
    ) -> None:
        self._seed = config.run.seed
        self._settings = settings
        self._model_path = model_path
        self._layout = layout
        self._group = group
        cores, gpu = sorted(os.sched_getaffinity(0)), layout.device == "gpu"
        num_engines = len(layout.engines)
        self.cores = [None if gpu else _share(cores, index, num_engines) for index in range(num_engines)]
        """Cores of each engine; None leaves them to the system."""

    def create(self, name: str) -> RemoteEngine:
        """Create an engine's actor, which starts with the current settings."""
        place, _, incarnation = name.partition("#")
        index = int(place.removeprefix("engine-"))
        cores = self.cores[index]
        spec = EngineSpec(
            name=name,
            model_path=str(self._model_path),
            settings=self._settings.now,
            # A new seed for each restart: the same samples again would explore nothing.
            seed=self._seed * 1000 + index + 1_000_000 * (int(incarnation or 1) - 1),
            cores=None if cores is None else tuple(cores),
            device=self._layout.device,
        )
        return RemoteEngine(create(EngineActor, self._layout, self._group, self._layout.engines[index]), spec)


@asynccontextmanager
async def start_cluster(config: Config, model_path: Path) -> AsyncIterator[Cluster]:
    """Place and start the processes of a run, and end them with the context."""
    directory = training_directory(config)
    with ray_session(config, directory):
        layout = await decide(config)
        on_history = config.speculation is not None and config.speculation.has_random_drafter
        drafter = None
        if directory is not None:
            _check_training(config, layout)
            config = _with_own_embeddings(config, model_path, directory)
            _, drafter = _trained_drafter(config)
        settings = CurrentSettings(config.rollout.engine, config.speculation, on_history=on_history)
        spec = _learner_spec(config, layout, model_path, directory)
        group = reserve(layout)
        starter = EngineStarter(config, layout, group, model_path, settings)
        members = Members()
        for index in range(len(layout.engines)):
            members.register(starter.create(f"engine-{index}"))
        max_restarts = config.rollout.max_restarts
        learner = RemoteLearner(
            lambda: [create(LearnerActor, layout, group, index, rank) for rank, index in enumerate(layout.ranks)],
            spec,
            settings,
            max_restarts=max_restarts,
        )
        sender = RemoteSender(learner, members, settings, layout.transport, drafter)
        cluster = Cluster(starter, learner, sender, members, settings, max_restarts=max_restarts)
        deadline_s = _ABANDON_DEADLINE_S
        try:
            await asyncio.gather(*(engine.start() for engine in cluster.engines), learner.start())
            for engine in cluster.engines:
                members.join(engine)
            if directory is not None:
                _train_drafter(cluster, config, layout, model_path, directory, starter.cores)
            yield cluster
            deadline_s = CLOSE_DEADLINE_S
        finally:
            parts = (*cluster.engines, learner)
            await asyncio.gather(*(part.close(deadline_s) for part in parts), return_exceptions=True)
            remove_placement_group(group)


async def rehearse(config: Config) -> ClusterLayout:
    """Return the layout of a run without starting it."""
    with ray_session(config, None):
        return await decide(config)


async def decide(config: Config) -> ClusterLayout:
    """Return the layout of this run in the connected cluster, after waiting for resources."""
    until_s = time.monotonic() + _ROOM_DEADLINE_S
    while True:
        nodes = await asyncio.to_thread(cluster_nodes, for_gpus=config.cluster.device != "cpu")
        try:
            return plan(nodes, config)
        except PacelineError:
            if time.monotonic() > until_s or not any(node.taken_gpus for node in nodes):
                raise
        await asyncio.sleep(1)


def _train_drafter(
    cluster: Cluster,
    config: Config,
    layout: ClusterLayout,
    model_path: Path,
    directory: Path,
    cores: Sequence[Sequence[int] | None],
) -> None:
    """Put a drafter trainer beside each engine. `cores` are the engines'."""
    speculation, checkpoint = _trained_drafter(config)
    members, places = cluster.members, cluster.members.places
    cluster.trainers = [
        RemoteTrainer(
            members,
            WorkerSettings(
                name=place,
                drafter=checkpoint,
                directory=directory,
                max_draft_length=speculation.max_draft_length,
                training=speculation.training,
                cpus=None if share is None else tuple(share),
                device=layout.device,
                seed=config.run.seed,
            ),
        )
        for place, share in zip(places, cores, strict=True)
    ]
    learner_cores = set(cluster.learner.spec.cores or os.sched_getaffinity(0))
    apart = [place for place, share in zip(places, cores, strict=True) if not learner_cores.intersection(share or ())]
    store = FileStore(directory, checkpoint, places, speculation)
    switch = None
    if cluster.settings.now.speculation != speculation:
        kind, length = speculation.drafter.kind, speculation.max_draft_length
        costs_K = draft_costs(checkpoint, model_path, kind=kind, max_draft_length=length)
        switch = DrafterSwitch(cluster, SwitchMonitor(costs_K))
    cluster.drafter = OnlineDrafterTraining(
        members,
        cluster.trainers,
        RoundSender(cluster.sender, store.rounds),
        store,
        speculation.training,
        apart=apart,
        switch=switch,
    )


def training_directory(config: Config) -> Path | None:
    """Create a directory that learner and trainers share, or return None without drafter training.

    Its name is the first free number instead of a random one, because vLLM's compile cache depends on the drafter's
    path."""
    if config.speculation is None or config.speculation.training.mode == "off":
        return None
    root = private_directory(config.speculation.training.buffer.directory / f"paceline-{os.getuid()}")
    number = 0
    while True:
        try:
            (root / str(number)).mkdir(mode=0o700)
        except FileExistsError:  # of a running run
            number += 1
        else:
            return root / str(number)


def _check_training(config: Config, layout: ClusterLayout) -> None:
    speculation, _ = _trained_drafter(config)
    if speculation.drafter.kind == "dflash" and layout.device == "cpu":
        raise PacelineError(
            "speculation.training.mode: must be off with drafter.kind dflash because vLLM's CPU backend cannot take "
            "new weights of one; eagle3 can be trained"
        )
    if len(layout.training_hosts) < len(layout.engines):
        raise PacelineError(
            f"speculation.training.mode: must be off here, because {len(layout.engines) - len(layout.training_hosts)} "
            f"of {len(layout.engines)} engines are on another node than the learner or the driver, and training data "
            "goes through a directory of one node; start the driver on a node that has room for the whole run"
        )


def _with_own_embeddings(config: Config, model_path: Path, directory: Path) -> Config:
    speculation, checkpoint = _trained_drafter(config)
    dtype = getattr(torch, config.rollout.engine.dtype)
    if speculation.has_random_drafter:
        checkpoint = directory / "random"
        kind, length = speculation.drafter.kind, speculation.max_draft_length
        write_new_drafter(kind, model_path, checkpoint, seed=config.run.seed, draft_length=length)
    path = with_own_embeddings(checkpoint, directory / "drafter", model_path=model_path, dtype=dtype)
    if speculation.has_random_drafter and path != checkpoint:
        remove_directory(checkpoint)  # probably in shared memory
    drafter = speculation.drafter.model_copy(update={"path": str(path), "init": "checkpoint"})
    return config.model_copy(update={"speculation": speculation.model_copy(update={"drafter": drafter})})


def _trained_drafter(config: Config) -> tuple[SpeculationConfig, Path]:
    speculation = config.speculation
    assert speculation is not None and isinstance(speculation.drafter, LearnedDrafter), "the config says so"
    return speculation, Path(speculation.drafter.path)


def _learner_spec(config: Config, layout: ClusterLayout, model_path: Path, directory: Path | None) -> LearnerRankSpec:
    cores, num_cpus, world_size = sorted(os.sched_getaffinity(0)), config.learner.cpus, config.learner.world_size
    gpu = layout.device == "gpu"
    return LearnerRankSpec(
        model_path=str(model_path),
        learner=config.learner,
        objective=config.objective,
        temperature=config.rollout.temperature,
        seed=config.run.seed,
        engine=config.rollout.engine,
        num_threads=None if gpu else num_cpus or max(1, len(cores) // world_size),
        cores=None if gpu or num_cpus is None else tuple(cores[: num_cpus * world_size]),
        hand_over=None if directory is None else _hand_over(config, model_path, directory),
        device=layout.device,
        transport=layout.transport,
    )


def _hand_over(config: Config, model_path: Path, directory: Path) -> HiddenStateWriterSettings:
    speculation, checkpoint = _trained_drafter(config)
    return HiddenStateWriterSettings(
        directory=documents_in(directory), taps=read_taps(checkpoint, model_path), buffer=speculation.training.buffer
    )


def reserve(layout: ClusterLayout) -> PlacementGroup:
    bundles = [bundle.resources for bundle in layout.bundles]
    nodes = [{} if bundle.node is None else {"ray.io/node-id": bundle.node} for bundle in layout.bundles]
    group = placement_group(
        bundles,
        strategy=layout.strategy,
        bundle_label_selector=nodes if any(nodes) else None,  # pyright: ignore[reportArgumentType]  None is its default
    )
    if not group.wait(_ROOM_DEADLINE_S):
        remove_placement_group(group)
        raise PacelineError(
            f"Ray found no room for {bundles} within {_ROOM_DEADLINE_S:.0f} s; lower rollout.num_engines or "
            "learner.world_size, or wait until other jobs have ended"
        )
    return group


def create(actor: type, layout: ClusterLayout, group: PlacementGroup, index: int, *args: Any) -> Any:
    """Create an actor in a bundle, with all its GPUs."""
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
    num_gpus = layout.bundles[index].num_gpus
    options = {"num_cpus": 1, "num_gpus": num_gpus, "scheduling_strategy": strategy, "max_restarts": 0}
    return ray.remote(actor).options(**options).remote(*args)


def _share(cores: Sequence[int], index: int, num_engines: int) -> list[int]:
    """Return the cores of one engine: an exclusive share if there are enough, otherwise one core in turn."""
    if num_engines >= len(cores):
        return [cores[index % len(cores)]]
    return list(cores[index * len(cores) // num_engines : (index + 1) * len(cores) // num_engines])
