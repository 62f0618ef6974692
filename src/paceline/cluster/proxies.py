"""An engine's actor as the loop sees it. The learner is in remote_learner.py, what sends its weights in sender.py.

Every call to an actor has a deadline, because Ray calls a stopped process alive.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError, RayTaskError

from paceline.cluster.clock import RemoteClock
from paceline.config import EngineConfig, SpeculationConfig
from paceline.drafters.worker import WorkerSettings
from paceline.types import (
    DeviceKind,
    DraftBin,
    EngineLostError,
    PacelineError,
    Receipt,
    Rollout,
    RolloutId,
    RolloutRequest,
)
from paceline.weights.distributed import GroupAddress
from paceline.weights.message import Push

T = TypeVar("T")

_POLL_S = 10.0
"""An engine answers `collect` at least this often, with nothing if nothing has finished: silence means that it is
lost."""
CLOSE_DEADLINE_S = 8.0
_NO_DEADLINE_S = 1e6


class RemoteEngine:
    """types.Engine over an EngineActor."""

    def __init__(self, name: str, actor: Any, config: EngineConfig) -> None:
        self.name = name
        self.actor = actor
        self.pid = 0
        self._config = config
        self.speculation: SpeculationConfig | None = None
        """What it was started with, like `config`."""
        self.start_s = 0.0
        """Seconds that its last start took."""
        self._clock = RemoteClock()
        self._closing: asyncio.Task[None] | None = None

    async def start(
        self,
        model_path: str,
        seed: int,
        cpus: Sequence[int] | None,
        speculation: SpeculationConfig | None,
        device: DeviceKind,
    ) -> None:
        began_s, self.speculation = time.monotonic(), speculation
        starting = self.actor.start.remote(self.name, model_path, self._config, seed, cpus, speculation, device)
        self.pid = await self._answer("start", starting, self._config.start_deadline_s + self._config.call_deadline_s)
        self.start_s = time.monotonic() - began_s
        for _ in range(3):
            await self._compare_clocks()

    async def restart(self, config: EngineConfig, speculation: SpeculationConfig | None) -> None:
        began_s, self._config, self.speculation = time.monotonic(), config, speculation
        restarting = self.actor.restart.remote(config, speculation)
        await self._answer("restart", restarting, config.start_deadline_s + config.call_deadline_s)
        self.start_s = time.monotonic() - began_s

    @property
    def config(self) -> EngineConfig:
        """What it was started with."""
        return self._config

    async def heartbeat(self) -> None:
        """Return when the engine has shown that it lives. Whoever asks decides how long that may take."""
        await self._answer("heartbeat", self.actor.heartbeat.remote(), _NO_DEADLINE_S)

    async def submit(self, requests: Sequence[RolloutRequest]) -> None:
        await self._answer("submit", self.actor.submit.remote(list(requests)))

    async def abort(self, ids: Sequence[RolloutId]) -> None:
        await self._answer("abort", self.actor.abort.remote(list(ids)))

    async def collect(self) -> Sequence[Rollout]:
        while True:
            rollouts = await self._answer(
                "collect", self.actor.collect.remote(_POLL_S), _POLL_S + self._config.call_deadline_s
            )
            if rollouts:
                return [self._clock.rollout(rollout) for rollout in rollouts]

    async def receive(self, push: Push) -> Receipt:
        """Like all of types.Engine it raises when the engine is gone; a push that was refused is in the receipt."""
        # Beside the push it pauses, drops cached prefixes, sets the version and resumes.
        deadline_s = self._config.push_deadline_s + 5 * self._config.call_deadline_s
        return await self._answer("receive", self.actor.receive.remote(push), deadline_s)

    async def join_group(self, address: GroupAddress, first_rank: int) -> str | None:
        deadline_s = self._config.push_deadline_s + self._config.call_deadline_s
        return await self._answer("join_group", self.actor.join_group.remote(address, first_rank), deadline_s)

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

    async def trainer_ready(self) -> None:
        wait_s = self._config.start_deadline_s
        ready = self.actor.trainer_ready.remote(wait_s)
        await self._answer("trainer_ready", ready, wait_s + self._config.call_deadline_s)

    async def trainer_lease(self) -> float:
        return await self._answer("trainer_lease", self.actor.trainer_lease.remote())

    async def trainer_recall(self) -> None:
        await self._answer("trainer_recall", self.actor.trainer_recall.remote())

    async def trainer_kill(self) -> None:
        await self._answer("trainer_kill", self.actor.trainer_kill.remote())

    async def trainer_ended(self) -> int:
        while True:
            answer = self.actor.trainer_ended.remote(_POLL_S)
            code = await self._answer("trainer_ended", answer, _POLL_S + self._config.call_deadline_s)
            if code is not None:
                return code

    async def metrics(self) -> Mapping[str, float]:
        return await self._answer("metrics", self.actor.call.remote("metrics"))

    async def take_timeline(self) -> Sequence[DraftBin]:
        if not self._clock.is_shared:
            await self._compare_clocks()  # every step: clocks of two machines drift apart
        bins = await self._answer("take_timeline", self.actor.call.remote("take_timeline"))
        return [self._clock.draft_bin(item) for item in bins]

    async def close(self, deadline_s: float = CLOSE_DEADLINE_S) -> None:
        """End the actor; a second call waits for the first, which may still be ending what belongs to the actor."""
        self._closing = self._closing or asyncio.create_task(self._close(deadline_s))
        await asyncio.shield(self._closing)

    async def _close(self, deadline_s: float) -> None:
        with suppress(PacelineError):  # it is killed next in either case
            await self._answer("close", self.actor.call.remote("close"), deadline_s)
        ray.kill(self.actor)

    async def _compare_clocks(self) -> None:
        asked_s = time.monotonic()
        machine, theirs_s = await self._answer("clock", self.actor.clock.remote())
        self._clock.compare(machine, asked_s=asked_s, theirs_s=theirs_s, answered_s=time.monotonic())

    async def _answer(self, what: str, answer: Awaitable[T], deadline_s: float | None = None) -> T:
        deadline_s = deadline_s or self._config.call_deadline_s
        try:
            return await asyncio.wait_for(plain(answer), deadline_s)
        except TimeoutError:
            raise EngineLostError(self.name, f"{what} did not answer within {deadline_s:.0f} s") from None
        except RayError as error:
            why = why_lost(error, what)
            if why is None:
                raise
            raise EngineLostError(self.name, why) from None


async def plain(answer: Awaitable[T]) -> T:
    """Ray's futures are awaitable but no coroutines, which asyncio's combinators want."""
    return await answer


def why_lost(error: RayError, what: str) -> str | None:
    """Why a process has to be given up after this error; None if its code has raised it and the process is sound.

    Ray has an error of its own for every way in which a process, its node or an answer of it can be lost, and they have
    no base in common: an actor that is killed for memory raises no RayActorError. So all of Ray's own errors count, and
    of those that the process itself has raised, the ones that say it can do nothing more.
    """
    if not isinstance(error, RayTaskError):
        return f"its process ended during {what}: {_first_line(error)}"
    cause: object = error.cause
    if isinstance(cause, EngineLostError):
        return cause.why
    if isinstance(cause, RayError | MemoryError | OSError):
        return f"{what} failed in its process: {_first_line(cause)}"
    return None


def _first_line(error: BaseException) -> str:
    """Names the error too: some of Ray's say nothing else."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
