"""Engine proxy over a Ray actor. Every call has a deadline, because Ray reports a stopped process as alive."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar, cast

import ray
from ray.exceptions import RayError, RayTaskError

from paceline.cluster.clock import RemoteClock
from paceline.cluster.specs import EngineSettings, EngineSpec
from paceline.drafters.worker import WorkerSettings
from paceline.types import (
    DraftBin,
    Engine,
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
"""Longest wait of one poll. The actor answers an empty poll, so a missing answer means a lost engine."""
CLOSE_DEADLINE_S = 8.0
_NO_DEADLINE_S = 1e6


class RemoteEngine:
    """types.Engine over an EngineActor."""

    def __init__(self, actor: Any, spec: EngineSpec) -> None:
        self.actor = actor
        self._spec = spec
        self.name = spec.name
        self.pid = 0
        self.start_s = 0.0
        """Duration of the last start."""
        self._clock = RemoteClock()
        self._closing: asyncio.Task[None] | None = None

    @property
    def settings(self) -> EngineSettings:
        """Settings of the last start."""
        return self._spec.settings

    async def start(self) -> None:
        began_s = time.monotonic()
        self.pid = await self._ask("start", self._spec, deadline_s=self._start_deadline_s)
        self.start_s = time.monotonic() - began_s
        for _ in range(3):
            await self._compare_clocks()

    async def restart(self, settings: EngineSettings) -> None:
        began_s, self._spec = time.monotonic(), replace(self._spec, settings=settings)
        await self._ask("restart", self._spec, deadline_s=self._start_deadline_s)
        self.start_s = time.monotonic() - began_s

    async def heartbeat(self) -> None:
        """Return when the engine has answered. The caller sets the deadline."""
        await self._ask("heartbeat", deadline_s=_NO_DEADLINE_S)

    async def submit(self, requests: Sequence[RolloutRequest]) -> None:
        await self._ask("submit", list(requests))

    async def abort(self, ids: Sequence[RolloutId]) -> None:
        await self._ask("abort", list(ids))

    async def collect(self) -> Sequence[Rollout]:
        while True:
            if rollouts := await self._poll("collect"):
                return [self._clock.rollout(rollout) for rollout in rollouts]

    async def receive(self, push: Push) -> Receipt:
        """Deliver a push. The receipt reports a refused push; a lost engine raises EngineLostError."""
        # The engine also pauses, drops cached prefixes, sets the version and resumes.
        deadline_s = self.settings.engine.push_deadline_s + 5 * self.settings.engine.call_deadline_s
        return await self._ask("receive", push, deadline_s=deadline_s)

    async def join_group(self, address: GroupAddress, first_rank: int) -> str | None:
        deadline_s = self.settings.engine.push_deadline_s + self.settings.engine.call_deadline_s
        return await self._ask("join_group", address, first_rank, deadline_s=deadline_s)

    async def pause(self) -> None:
        await self._ask("pause")

    async def resume(self) -> None:
        await self._ask("resume")

    async def sleep(self) -> None:
        await self._ask("sleep")

    async def wake(self) -> None:
        await self._ask("wake")

    async def stop_speculation(self) -> None:
        await self._ask("stop_speculation")

    async def trainer_start(self, settings: WorkerSettings) -> int:
        return await self._ask("trainer_start", settings)

    async def trainer_ready(self) -> None:
        await self._ask("trainer_ready", self.settings.engine.start_deadline_s, deadline_s=self._start_deadline_s)

    async def trainer_lease(self) -> float:
        return await self._ask("trainer_lease")

    async def trainer_recall(self) -> None:
        await self._ask("trainer_recall")

    async def trainer_kill(self) -> None:
        await self._ask("trainer_kill")

    async def trainer_ended(self) -> int:
        while True:
            if (code := await self._poll("trainer_ended")) is not None:
                return code

    async def metrics(self) -> Mapping[str, float]:
        return await self._ask("metrics")

    async def take_timeline(self) -> Sequence[DraftBin]:
        if not self._clock.is_shared:
            await self._compare_clocks()  # every step, because clocks of two machines drift apart
        return [self._clock.draft_bin(item) for item in await self._ask("take_timeline")]

    async def close(self, deadline_s: float = CLOSE_DEADLINE_S) -> None:
        """Close the engine and kill the actor. Another call waits for the first."""
        self._closing = self._closing or asyncio.create_task(self._close(deadline_s))
        await asyncio.shield(self._closing)

    async def _close(self, deadline_s: float) -> None:
        with suppress(PacelineError):  # the actor is killed next
            await self._ask("close", deadline_s=deadline_s)
        ray.kill(self.actor)

    async def _compare_clocks(self) -> None:
        asked_s = time.monotonic()
        machine, theirs_s = await self._ask("clock")
        self._clock.compare(machine, asked_s=asked_s, theirs_s=theirs_s, answered_s=time.monotonic())

    @property
    def _start_deadline_s(self) -> float:
        return self.settings.engine.start_deadline_s + self.settings.engine.call_deadline_s

    async def _poll(self, method: str) -> Any:
        return await self._ask(method, _POLL_S, deadline_s=_POLL_S + self.settings.engine.call_deadline_s)

    async def _ask(self, method: str, *args: Any, deadline_s: float | None = None) -> Any:
        """Call a method of the actor; raise EngineLostError if the actor fails or misses the deadline."""
        deadline_s = deadline_s or self.settings.engine.call_deadline_s
        try:
            return await asyncio.wait_for(plain(getattr(self.actor, method).remote(*args)), deadline_s)
        except TimeoutError:
            raise EngineLostError(self.name, f"{method} did not answer within {deadline_s:.0f} s") from None
        except RayError as error:
            why = why_lost(error, method)
            if why is None:
                raise
            raise EngineLostError(self.name, why) from None


def remote(engine: Engine) -> RemoteEngine:
    """Return an engine of a cluster's registry with its type."""
    return cast("RemoteEngine", engine)


async def plain(answer: Awaitable[T]) -> T:
    """Wrap a Ray future, which is awaitable, in the coroutine that asyncio.wait_for and gather need."""
    return await answer


def why_lost(error: RayError, what: str) -> str | None:
    """Return why the process is lost after this error, or None if its own code raised and the process is sound.

    Ray has unrelated error classes for a lost process, node or answer; an actor killed for memory raises no
    RayActorError. So every error of Ray itself counts, and of the errors raised in the process those that mean that it
    cannot continue.
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
    """Return class and first line of an error. Some of Ray's errors have no message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
