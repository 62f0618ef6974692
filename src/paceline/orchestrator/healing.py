"""Engines that are lost come back: heartbeats find them, and a new one takes the place of each.

    engines ── heartbeats ──▶ Medic (medic.py) ──orders──▶ restarter: start a process in the same place, catch up
    members ── lost, joined ──▶   ▲                                │
                                  └───── what came of them, and the clock

The run goes on meanwhile. A new engine has no rollouts before it has the present policy with fingerprints that match:
it joins in the same moment.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from typing import Protocol

from paceline.orchestrator.journal import Journal
from paceline.orchestrator.medic import BEAT_S, Medic, Sign, Treatment, TreatmentOrder
from paceline.orchestrator.members import Members, life_name, place_of
from paceline.types import Engine, EngineLostError, Receipt

_TICK_S = 1.0


class Restarter(Protocol):
    """Starts engines, and hears whether they live."""

    async def beat(self, engine: Engine) -> None:
        """Return when the engine shows that it lives, and raise EngineLostError when it does not; no deadline."""
        ...

    async def start(self, name: str) -> Engine:
        """Start an engine under this name, in its place; raises EngineLostError if it does not start."""
        ...

    async def catch_up(self, engine: Engine) -> Receipt:
        """Give the policy that the members have to an engine, which joins them if it holds it."""
        ...


class Healer(Protocol):
    """What the loop knows of this."""

    def running(self, journal: Journal) -> AbstractAsyncContextManager[None]:
        """Heal engines for as long as the context lasts."""
        ...


class NoHealing:
    """An engine that is lost stays lost."""

    def running(self, journal: Journal) -> AbstractAsyncContextManager[None]:
        return nullcontext()


class Healing:
    """Healer for one run. `running` is its lifetime."""

    def __init__(self, members: Members, restarter: Restarter, *, max_restarts: int) -> None:
        self._members = members
        self._restarter = restarter
        self._medic = Medic(members.names, max_restarts=max_restarts)
        self._new: dict[str, Engine] = {}
        """Engines that have started and not joined, by place."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._clock_s = 0.0
        """Time in which this process could hear a heartbeat: what it has slept through itself says nothing about
        engines."""
        self._running = False
        members.on_lost(lambda name, why: self._sign(name, Sign.DIED))
        members.on_joined(self._joined)

    @asynccontextmanager
    async def running(self, journal: Journal) -> AsyncIterator[None]:
        self._journal = journal
        self._members.healed = self._running = True
        self._medic.begin(self._clock_s)
        self._spawn(self._keep_time())
        for engine in self._members.engines:
            self._spawn(self._watch(engine))
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
        place = place_of(engine.name)
        self._new.pop(place, None)
        self._sign(engine.name, Sign.JOINED)
        self._journal.engine_healed(engine.name, self._medic.healing_s(place))
        self._spawn(self._watch(engine))

    async def _watch(self, engine: Engine) -> None:
        while self._members.is_alive(engine.name):
            try:
                await self._restarter.beat(engine)
            except EngineLostError as lost:
                self._members.lose(engine.name, lost.why)
            except Exception as error:  # noqa: BLE001  an event, and an engine of which nobody knows whether it lives
                self._members.lose(engine.name, f"its heartbeat failed: {error!r}")
            else:
                self._sign(engine.name, Sign.BEAT)
                await asyncio.sleep(BEAT_S)

    async def _keep_time(self) -> None:
        last_s = _now_s()
        while True:
            await asyncio.sleep(_TICK_S)
            now_s = _now_s()
            self._clock_s += min(now_s - last_s, 2 * _TICK_S)
            last_s = now_s
            self._treat(self._medic.due(self._clock_s))

    def _sign(self, name: str, sign: Sign) -> None:
        if self._running:
            self._treat(self._medic.on(place_of(name), sign, self._clock_s))

    def _treat(self, orders: list[TreatmentOrder]) -> None:
        for place, treatment in orders:
            name = life_name(place, self._medic.life(place))
            match treatment:
                case Treatment.LOSE:
                    self._members.lose(name, "does not answer its heartbeat")
                case Treatment.START:
                    self._spawn(self._start(name))
                case Treatment.CATCH_UP:
                    self._spawn(self._catch_up(name))
                case Treatment.GIVE_UP:
                    self._journal.event("engine_given_up", engine=name)
                    self._members.give_up(place)

    async def _start(self, name: str) -> None:
        self._journal.event("engine_restarting", engine=name)
        try:
            self._new[place_of(name)] = await self._restarter.start(name)
        except Exception as error:  # noqa: BLE001  an event; the medic decides whether it is tried again
            self._failed(name, error)
        else:
            self._sign(name, Sign.STARTED)

    async def _catch_up(self, name: str) -> None:
        engine = self._new[place_of(name)]
        try:
            receipt = await self._restarter.catch_up(engine)
            if receipt.ok:
                return  # it has joined
            raise EngineLostError(name, receipt.error or f"fingerprints differ: {', '.join(receipt.mismatched[:3])}")
        except Exception as error:  # noqa: BLE001  as above
            with suppress(Exception):  # it is not used in either case, and its place was asked for by nobody else
                await engine.close()
            self._failed(name, error)

    def _failed(self, name: str, error: Exception) -> None:
        self._new.pop(place_of(name), None)
        why = error.why if isinstance(error, EngineLostError) else repr(error)
        self._journal.event("engine_restart_failed", engine=name, why=why)
        self._sign(name, Sign.FAILED)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
