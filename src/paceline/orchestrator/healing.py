"""Replace lost engines: heartbeats find them, and a restarted engine joins once it has the policy.

    engines ── heartbeats ──▶ EngineSupervisor (supervision.py) ──▶ restarter: start in the same place, catch up
    members ── lost, joined ──▶   ▲                                     │
                                  └───────── results, and the clock ────┘

The run continues meanwhile. A new engine gets rollouts only when it holds the current policy with matching
fingerprints, which is the moment in which it joins.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from typing import Protocol

from paceline.orchestrator.journal import Journal, clock_s
from paceline.orchestrator.members import Members, incarnation_name, place_of
from paceline.orchestrator.supervision import BEAT_S, EngineSupervisor, HealthEvent, RecoveryAction, RecoveryOrder
from paceline.types import Engine, EngineLostError, Receipt

_TICK_S = 1.0


class Restarter(Protocol):
    """Start engines and ask them for heartbeats."""

    async def beat(self, name: str) -> None:
        """Return when the engine shows that it is alive; raise EngineLostError if it is not. No deadline."""

    async def start(self, name: str) -> None:
        """Start an engine with this name in its place and register it; raise EngineLostError if it does not start."""

    async def catch_up(self, name: str) -> Receipt:
        """Send the current policy to a registered engine, which joins the members if it holds it."""
        ...


class Healer:
    """Healing as the loop sees it. With the base class, lost engines stay lost."""

    def running(self, journal: Journal) -> AbstractAsyncContextManager[None]:
        """Heal engines inside the context."""
        return nullcontext()


class Healing(Healer):
    """Healer for one run."""

    def __init__(self, members: Members, restarter: Restarter, *, max_restarts: int) -> None:
        self._members = members
        self._restarter = restarter
        self._supervisor = EngineSupervisor(members.places, max_restarts=max_restarts)
        self._tasks: set[asyncio.Task[None]] = set()
        self._clock_s = 0.0
        """Time in which this process could hear a heartbeat. While it is suspended itself, silence means nothing."""
        self._running = False
        members.on_lost(lambda name, why: self._on(name, HealthEvent.DIED))
        members.on_joined(self._joined)

    @asynccontextmanager
    async def running(self, journal: Journal) -> AsyncGenerator[None]:
        self._journal = journal
        self._members.healed = self._running = True
        self._supervisor.begin(self._clock_s)
        self._spawn(self._keep_time())
        for name in self._members.names:
            self._spawn(self._watch(name))
        try:
            yield
        finally:
            self._members.healed = self._running = False
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _joined(self, engine: Engine) -> None:
        if not self._running:
            return
        self._on(engine.name, HealthEvent.JOINED)
        self._journal.engine_healed(engine.name, self._supervisor.downtime_s(place_of(engine.name)))
        self._spawn(self._watch(engine.name))

    async def _watch(self, name: str) -> None:
        while self._members.is_alive(name):
            try:
                await self._restarter.beat(name)
            except EngineLostError as lost:
                self._members.lose(name, lost.why)
            except Exception as error:  # noqa: BLE001  recorded; the engine may be dead
                self._members.lose(name, f"its heartbeat failed: {error!r}")
            else:
                self._on(name, HealthEvent.BEAT)
                await asyncio.sleep(BEAT_S)

    async def _keep_time(self) -> None:
        last_s = clock_s()
        while True:
            await asyncio.sleep(_TICK_S)
            now_s = clock_s()
            self._clock_s += min(now_s - last_s, 2 * _TICK_S)
            last_s = now_s
            self._carry_out(self._supervisor.due(self._clock_s))

    def _on(self, name: str, event: HealthEvent) -> None:
        if self._running:
            self._carry_out(self._supervisor.on(place_of(name), event, self._clock_s))

    def _carry_out(self, orders: list[RecoveryOrder]) -> None:
        for place, action in orders:
            name = incarnation_name(place, self._supervisor.incarnation(place))
            match action:
                case RecoveryAction.LOSE:
                    self._members.lose(name, "does not answer its heartbeat")
                case RecoveryAction.START:
                    self._spawn(self._start(name))
                case RecoveryAction.CATCH_UP:
                    self._spawn(self._catch_up(name))
                case RecoveryAction.GIVE_UP:
                    self._journal.event("engine_given_up", engine=name)
                    self._members.give_up(place)

    async def _start(self, name: str) -> None:
        self._journal.event("engine_restarting", engine=name)
        try:
            await self._restarter.start(name)
        except Exception as error:  # noqa: BLE001  recorded; the supervisor decides about another start
            self._failed(name, error)
        else:
            self._on(name, HealthEvent.STARTED)

    async def _catch_up(self, name: str) -> None:
        try:
            receipt = await self._restarter.catch_up(name)
            if receipt.ok:
                return  # it has joined
            raise EngineLostError(name, receipt.error or f"fingerprints differ: {', '.join(receipt.mismatched[:3])}")
        except Exception as error:  # noqa: BLE001  as above
            with suppress(Exception):  # the engine is unused either way
                await self._members.newest(place_of(name)).close()
            self._failed(name, error)

    def _failed(self, name: str, error: Exception) -> None:
        why = error.why if isinstance(error, EngineLostError) else repr(error)
        self._journal.event("engine_restart_failed", engine=name, why=why)
        self._on(name, HealthEvent.FAILED)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
