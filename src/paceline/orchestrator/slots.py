"""Leases carried out: idle engines sleep while trainers use their devices, and wake when they have work.

    fleet ── on_work, on_drained ──▶ Leases (leases.py) ──orders──▶ engines: sleep, wake   trainers: lease, recall, kill
    drafter training ── open, recall ──┘      ▲                                                  │
                                              └──────────── what came of them, and the clock ────┘

A slot is an engine's device together with the engine and the trainer that take turns on it; it has the name of the
engine's place (members.py), and an engine that takes the place of a lost one takes its slot. Whatever fails here is
counted. A failure of a trainer costs its training; an engine that fails to sleep, to stop its trainer or to wake is
lost, because nobody knows what it does, and rollouts that wait for it would wait for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from paceline.config import LeaseConfig
from paceline.drafters.failures import Failures
from paceline.orchestrator.journal import Journal
from paceline.orchestrator.leases import Account, Action, Event, Leases, LeaseState, Order
from paceline.orchestrator.members import Members, place_of
from paceline.types import Engine, EngineLostError

_MAX_CRASHES = 3
"""Crashes in a row of one slot's trainers without a round closed in between; a new process will not help after that."""
_WAKE_DEADLINE_S = 300.0
"""An engine that has not come back from sleep or from its trainer by then is lost; every call on the way to it has a
shorter deadline of its own."""
_AWAKE = frozenset({LeaseState.BUSY, LeaseState.IDLE, LeaseState.LOST})
_UNLEASED = frozenset(LeaseState) - {LeaseState.LEASED, LeaseState.RECALLED}
_SPANS = {
    LeaseState.BUSY: "generate",
    LeaseState.LEASED: "train",
    LeaseState.RECALLED: "waking",
    LeaseState.WAKING: "waking",
    LeaseState.ROUSED: "waking",
}

Span = tuple[str, str, float, float]
"""Engine, use of its slot, begin and end."""


class Trainer(Protocol):
    """The training process beside one engine. Calls raise EngineLostError when the slot is gone, engine and all."""

    async def start(self, *, awaited: bool) -> None:
        """Make a new process. One that is awaited could train when this returns, or has ended; another one runs in its
        leases only, from its first instruction on."""
        ...

    async def lease(self) -> float:
        """Let it run; returns the CPU seconds that it has used since its last lease."""
        ...

    async def recall(self) -> None:
        """Stop it in the middle of what it does; it goes on there in its next lease."""
        ...

    async def kill(self) -> None: ...

    async def ended(self) -> str:
        """Wait for its end; says how it ended."""
        ...


class Slots:
    """All slots of a run. `running` is their lifetime."""

    def __init__(
        self, members: Members, trainers: Sequence[Trainer], config: LeaseConfig, *, choosy: bool = True
    ) -> None:
        self._members = members
        self._engines = {place_of(engine.name): engine for engine in members.engines}
        """The present or last engine of each slot."""
        self._trainers = dict(zip(self._engines, trainers, strict=True))
        self._leases = Leases(list(self._engines), config, choosy=choosy)
        self._crashes = dict.fromkeys(self._engines, 0)
        self.failures = Failures(lambda what, error: self._journal.event("slot_failed", during=what, why=repr(error)))
        """Errors that nobody foresaw, since the run began."""
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._spans: list[Span] = []
        self._span_began: dict[str, tuple[str, float]] = {}
        members.on_lost(lambda engine, why: self._event(place_of(engine), Event.LOST))
        members.on_joined(self._joined)

    @property
    def names(self) -> list[str]:
        """Names of all slots, those of lost engines as well."""
        return list(self._engines)

    @property
    def account(self) -> Account:
        return self._leases.account

    @asynccontextmanager
    async def running(self, journal: Journal) -> AsyncIterator[None]:
        """Start the trainers, keep the leases' time, and end the trainers."""
        self._journal = journal
        self._span_began = dict.fromkeys(self._engines, ("idle", _now_s()))
        self._spawn(self._keep_time())
        # Before the run begins: in it, a trainer starts in its leases.
        await asyncio.gather(*(self._start(engine, awaited=True) for engine in self._engines))
        try:
            yield
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await asyncio.gather(*(trainer.kill() for trainer in self._trainers.values()), return_exceptions=True)

    def on_work(self, engine: str) -> None:
        self._event(place_of(engine), Event.WORK)

    def on_drained(self, engine: str) -> None:
        self._event(place_of(engine), Event.DRAINED)

    async def awake(self, engine: str) -> None:
        """Wait until the engine can take rollouts, or is lost."""
        await self._until(place_of(engine), _AWAKE)

    async def _until(self, slot: str, states: Collection[LeaseState]) -> None:
        name = self._engines[slot].name
        try:
            async with asyncio.timeout(_WAKE_DEADLINE_S):
                while self._leases.state(slot) not in states:
                    await self._changed.wait()
        except TimeoutError:
            why = f"was not awake {_WAKE_DEADLINE_S:.0f} s after it was called back from drafter training"
            self._members.lose(name, why)

    async def leased(self, engine: str) -> None:
        """Wait until the engine's trainer has its slot."""
        while self._leases.state(engine) is not LeaseState.LEASED:
            if self._leases.state(engine) is LeaseState.LOST:
                raise EngineLostError(engine, "its slot is gone")
            await self._changed.wait()

    def open(self, *, training_wanted: bool) -> None:
        """From now on slots without rollouts may be leased."""
        self._carry_out_all(self._leases.announce(now_s=_now_s(), phase_open=True, training_wanted=training_wanted))

    async def recall(self, engines: Sequence[str], *, awake: bool) -> None:
        """End the leases of these engines; returns when none of their trainers runs, or when all of them are
        `awake`."""
        began_s = _now_s()
        self._carry_out_all(self._leases.announce(now_s=began_s, phase_open=False, engines=engines))
        for engine in engines:
            await self._until(engine, _AWAKE if awake else _UNLEASED)
        self.account.stall_s += _now_s() - began_s

    def forgive_crashes(self) -> None:
        """Training works: crashes so far do not count against a slot any more."""
        self._crashes = dict.fromkeys(self._engines, 0)

    def take_spans(self) -> list[Span]:
        """What each slot was used for since the last call."""
        for engine in self._engines:
            self._cut_span(engine)
        spans, self._spans = self._spans, []
        return spans

    def _joined(self, engine: Engine) -> None:
        slot = place_of(engine.name)
        self._engines[slot] = engine
        self._crashes[slot] = 0
        self._event(slot, Event.JOINED)

    def _event(self, engine: str, event: Event, *, lease: int | None = None) -> None:
        self._carry_out_all(self._leases.on(engine, event, _now_s(), lease=lease))

    def _event_of(self, member: Engine, event: Event) -> None:
        """An event that means nothing once another engine has the slot."""
        slot = place_of(member.name)
        if self._engines[slot] is member:
            self._event(slot, event)

    def _carry_out_all(self, orders: Sequence[Order]) -> None:
        for engine in self._engines:
            if self._span_began[engine][0] != _SPANS.get(self._leases.state(engine), "idle"):
                self._cut_span(engine)
        for engine, action in orders:
            self._spawn(self._carry_out(engine, action))
        self._changed.set()
        self._changed = asyncio.Event()

    async def _carry_out(self, engine: str, action: Action) -> None:
        trainer, lease, member = self._trainers[engine], self._leases.lease(engine), self._engines[engine]
        try:
            match action:
                case Action.SLEEP:
                    await member.sleep()
                    self._event_of(member, Event.SLEPT)
                case Action.WAKE:
                    await member.wake()
                    self._event_of(member, Event.AWAKE)
                case Action.REPLACE:
                    await self._replace(engine)
                case Action.LEASE:
                    self.account.unleased_cpu_s += await trainer.lease()
                case Action.RECALL:
                    await trainer.recall()
                    self._event(engine, Event.STOPPED, lease=lease)
                case Action.KILL:
                    await trainer.kill()
        except EngineLostError as lost:
            self._members.lose(member.name, lost.why)
        except Exception as error:  # noqa: BLE001  counted; a lease that did not begin ends like any other
            self.failures.note(action.name.lower(), error)
            if action in (Action.SLEEP, Action.RECALL, Action.WAKE):
                self._members.lose(member.name, f"{action.name.lower()} failed: {error!r}")

    async def _start(self, engine: str, *, awaited: bool) -> None:
        """Give the slot a trainer, whose end, whenever it comes, is looked after."""
        member = self._engines[engine]
        try:
            await self._trainers[engine].start(awaited=awaited)
            self._spawn(self._await_end(engine))
        except EngineLostError as lost:
            self._members.lose(member.name, lost.why)
        except Exception as error:  # noqa: BLE001  counted; the slot has no trainer
            self.failures.note("start", error)
            self._leases.retire(engine)

    async def _replace(self, engine: str) -> None:
        self._crashes[engine] += 1
        if self._crashes[engine] <= _MAX_CRASHES:
            await self._start(engine, awaited=False)
        else:
            self._journal.event("trainer_given_up", engine=engine, crashes=self._crashes[engine])
            self._leases.retire(engine)

    async def _await_end(self, engine: str) -> None:
        member = self._engines[engine]
        try:
            why = await self._trainers[engine].ended()
        except EngineLostError as lost:
            self._members.lose(member.name, lost.why)
            return
        except Exception as error:  # noqa: BLE001  counted; a trainer that cannot be watched is replaced
            self.failures.note("watch", error)
            why = repr(error)
        if self._engines[engine] is member:
            self._journal.event("trainer_lost", engine=engine, why=why)
            self._event(engine, Event.CRASHED)

    async def _keep_time(self) -> None:
        while True:
            changed, due_s = self._changed, self._leases.next_due_s()
            try:
                await asyncio.wait_for(changed.wait(), None if due_s is None else max(0.0, due_s - _now_s()))
            except TimeoutError:
                assert due_s is not None
                # A clock may stand a rounding error before what it was to wait for.
                self._carry_out_all(self._leases.due(max(_now_s(), due_s)))

    def _cut_span(self, engine: str) -> None:
        label, began_s = self._span_began[engine]
        now_s = _now_s()
        if now_s > began_s:
            self._spans.append((engine, label, began_s, now_s))
        self._span_began[engine] = (_SPANS.get(self._leases.state(engine), "idle"), now_s)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failures.note("task", error)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
