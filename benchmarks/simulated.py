"""Simulated engines and weight wire for the control plane's bench and the loop's tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.plan.simulate import finished_rollout
from paceline.types import DraftBin, EngineLostError, Receipt, Rollout, RolloutId, RolloutRequest


@dataclass(slots=True, kw_only=True)
class SimulatedEngine:
    """Engine with rollouts that take `seconds_per_token` per token; at most `max_num_seqs` run at once."""

    name: str
    length_of: Callable[[RolloutRequest], int]
    max_num_seqs: int
    seconds_per_token: float
    lose_at_s: float | None = None
    """Time at which the engine dies with its requests."""
    policy_version: int = 0
    _running: dict[RolloutId, asyncio.TimerHandle] = field(default_factory=dict)
    _waiting: list[RolloutRequest] = field(default_factory=list)
    _finished: list[Rollout] = field(default_factory=list)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    async def submit(self, requests: Sequence[RolloutRequest]) -> None:
        self._check_alive()
        self._waiting += requests
        self._fill()

    async def collect(self) -> Sequence[Rollout]:
        if not self._finished:
            self._news.clear()
            if self.lose_at_s is not None:
                asyncio.get_running_loop().call_at(self.lose_at_s, self._news.set)
            await self._news.wait()
            self._check_alive()
        finished, self._finished = self._finished, []
        return finished

    async def abort(self, ids: Sequence[RolloutId]) -> None:
        self._check_alive()
        self._waiting = [request for request in self._waiting if request.id not in ids]
        for one in ids:
            if (ending := self._running.pop(one, None)) is not None:
                ending.cancel()
        self._fill()

    async def pause(self) -> None:
        self._check_alive()

    async def resume(self) -> None:
        self._check_alive()

    async def sleep(self) -> None:
        self._check_alive()

    async def wake(self) -> None:
        self._check_alive()

    async def metrics(self) -> Mapping[str, float]:
        return {"engine/running_requests": len(self._running), "engine/waiting_requests": len(self._waiting)}

    async def take_timeline(self) -> Sequence[DraftBin]:
        return ()

    async def close(self) -> None:
        return

    def _check_alive(self) -> None:
        if self.lose_at_s is not None and asyncio.get_running_loop().time() >= self.lose_at_s:
            raise EngineLostError(self.name, "killed by the simulation")

    def _fill(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting and len(self._running) < self.max_num_seqs:
            request = self._waiting.pop()
            length = self.length_of(request)
            self._running[request.id] = loop.call_later(
                length * self.seconds_per_token, self._finish, request, length, loop.time(), self.policy_version
            )

    def _finish(self, request: RolloutRequest, length: int, started_s: float, version: int) -> None:
        del self._running[request.id]
        rollout = finished_rollout(
            request, length, engine=self.name, started_s=started_s, version=version, version_end=self.policy_version
        )
        self._finished.append(rollout)
        self._news.set()
        self._fill()


@dataclass(slots=True, kw_only=True)
class SimulatedSender:
    """Delivers a push to every engine after `seconds`."""

    engines: Sequence[SimulatedEngine]
    seconds: float = 0.0

    async def send(self, version: int) -> Sequence[Receipt]:
        await asyncio.sleep(self.seconds)
        for engine in self.engines:
            engine.policy_version = version
        return [
            Receipt(engine=engine.name, version=version, num_tensors=1, num_bytes=1, seconds=self.seconds)
            for engine in self.engines
        ]


def long_tailed_lengths(
    seed: int, *, median: float = 70.0, sigma: float = 0.8, maximum: int = 640
) -> Callable[[RolloutRequest], int]:
    """Return log-normal lengths as in the arena; a rollout has the same length on every engine."""
    table = np.clip(np.random.default_rng(seed).lognormal(np.log(median), sigma, 65536), 1, maximum).astype(int)

    def length_of(request: RolloutRequest) -> int:
        return int(table[(request.group_id.number * 31 + request.index * 7919) % len(table)])

    return length_of
