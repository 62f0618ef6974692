"""Carry out leases: idle engines sleep while trainers use their devices, and wake when they get work.

    fleet ── on_work, on_drained ──▶ Leases (leases.py) ──orders──▶ engines: sleep, wake   trainers: lease, recall, kill
    drafter training ── open, recall ──┘      ▲                                                  │
                                              └──────────────── results, and the clock ──────────┘

A slot is an engine's device, with the engine and the trainer that share it. Its name is the engine's place
(members.py), so a restarted engine inherits the slot. All failures are counted. A failed trainer costs its training. An
engine that fails to sleep, to stop its trainer or to wake is lost, because rollouts would wait for it forever.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from paceline.drafters.failures import Failures
from paceline.orchestrator.journal import Journal, clock_s
from paceline.orchestrator.leases import Account, Action, Event, Leases, LeaseState, Order
from paceline.orchestrator.members import Members, place_of
from paceline.types import Engine, EngineLostError

_MAX_CRASHES = 3
"""Consecutive crashes of one slot's trainers without a closed round; after these, a new process does not help."""
_WAKE_DEADLINE_S = 300.0
"""An engine that takes longer to return from sleep or from its trainer is lost. Each call on the way has a shorter
deadline."""
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
"""Engine, use of its slot, start and end."""


class Trainer(Protocol):
    """The training process beside one engine. Calls raise EngineLostError if the engine is gone."""

    async def start(self, *, awaited: bool) -> None:
        """Create a new process. If `awaited`, wait until it can train or has ended; otherwise it runs during leases
        only."""

    async def lease(self) -> float:
        """Resume it; return the CPU seconds used since its last lease."""
        ...

    async def recall(self) -> None:
        """Suspend it until its next lease."""

    async def kill(self) -> None: ...

    async def ended(self) -> str:
        """Wait for its end and return the reason."""
        ...


class Slots:
    def __init__(self, members: Members, trainers: Sequence[Trainer], *, skip_short: bool = True) -> None:
        self._members = members
        self._trainers = dict(zip(members.places, trainers, strict=True))
        self._leases = Leases(members.places, skip_short=skip_short)
        self._crashes = dict.fromkeys(self._trainers, 0)
        self.failures = Failures(lambda what, error: self._journal.event("slot_failed", during=what, why=repr(error)))
        """Unexpected errors since the run began."""
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._spans: list[Span] = []
        self._span_began: dict[str, tuple[str, float]] = {}
        members.on_lost(lambda engine, why: self._event(place_of(engine), Event.LOST))
        members.on_joined(self._joined)

    @property
    def names(self) -> list[str]:
        """Return all slots, also of lost engines."""
        return list(self._trainers)

    @property
    def account(self) -> Account:
        return self._leases.account

    @asynccontextmanager
    async def running(self, journal: Journal) -> AsyncGenerator[None]:
        """Run the trainers and the leases' timers inside the context."""
        self._journal = journal
        self._span_began = dict.fromkeys(self._trainers, ("idle", clock_s()))
        self._spawn(self._keep_time())
        # During the run, trainers start in their leases.
        await asyncio.gather(*(self._start(slot, awaited=True) for slot in self._trainers))
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
        name = self._members.newest(slot).name
        try:
            async with asyncio.timeout(_WAKE_DEADLINE_S):
                while self._leases.state(slot) not in states:
                    await self._changed.wait()
        except TimeoutError:
            why = f"was not awake {_WAKE_DEADLINE_S:.0f} s after its recall from drafter training"
            self._members.lose(name, why)

    async def leased(self, engine: str) -> None:
        """Wait until the engine's trainer has its slot."""
        while self._leases.state(engine) is not LeaseState.LEASED:
            if self._leases.state(engine) is LeaseState.LOST:
                raise EngineLostError(engine, "its slot is gone")
            await self._changed.wait()

    def open(self, *, training_wanted: bool) -> None:
        """Allow leases of slots without rollouts."""
        self._carry_out_all(self._leases.announce(now_s=clock_s(), phase_open=True, training_wanted=training_wanted))

    async def recall(self, engines: Sequence[str], *, awake: bool) -> None:
        """End the leases of these engines, and wait until their trainers have stopped or, if `awake`, until they are
        awake."""
        began_s = clock_s()
        self._carry_out_all(self._leases.announce(now_s=began_s, phase_open=False, engines=engines))
        for engine in engines:
            await self._until(engine, _AWAKE if awake else _UNLEASED)
        self.account.stall_s += clock_s() - began_s

    def forgive_crashes(self) -> None:
        """Forget crashes so far, because training works."""
        self._crashes = dict.fromkeys(self._trainers, 0)

    def take_spans(self) -> list[Span]:
        """Return the use of each slot since the last call."""
        for slot in self._trainers:
            self._cut_span(slot)
        spans, self._spans = self._spans, []
        return spans

    def _joined(self, engine: Engine) -> None:
        slot = place_of(engine.name)
        self._crashes[slot] = 0
        self._event(slot, Event.JOINED)

    def _event(self, engine: str, event: Event, *, lease: int | None = None) -> None:
        self._carry_out_all(self._leases.on(engine, event, clock_s(), lease=lease))

    def _event_of(self, member: Engine, event: Event) -> None:
        """Handle an event of an engine, unless another engine has its slot by now."""
        slot = place_of(member.name)
        if self._members.newest(slot) is member:
            self._event(slot, event)

    def _carry_out_all(self, orders: Sequence[Order]) -> None:
        for slot in self._trainers:
            if self._span_began[slot][0] != _SPANS.get(self._leases.state(slot), "idle"):
                self._cut_span(slot)
        for slot, action in orders:
            self._spawn(self._carry_out(slot, action))
        self._changed.set()
        self._changed = asyncio.Event()

    async def _carry_out(self, slot: str, action: Action) -> None:
        trainer, lease, member = self._trainers[slot], self._leases.lease(slot), self._members.newest(slot)
        try:
            match action:
                case Action.SLEEP:
                    await member.sleep()
                    self._event_of(member, Event.SLEPT)
                case Action.WAKE:
                    await member.wake()
                    self._event_of(member, Event.AWAKE)
                case Action.REPLACE:
                    await self._replace(slot)
                case Action.LEASE:
                    self.account.unleased_cpu_s += await trainer.lease()
                case Action.RECALL:
                    await trainer.recall()
                    self._event(slot, Event.STOPPED, lease=lease)
                case Action.KILL:
                    await trainer.kill()
        except EngineLostError as lost:
            self._members.lose(member.name, lost.why)
        except Exception as error:  # noqa: BLE001  counted; a lease that did not begin ends like any other
            self.failures.note(action.name.lower(), error)
            if action in (Action.SLEEP, Action.RECALL, Action.WAKE):
                self._members.lose(member.name, f"{action.name.lower()} failed: {error!r}")

    async def _start(self, slot: str, *, awaited: bool) -> None:
        member = self._members.newest(slot)
        try:
            await self._trainers[slot].start(awaited=awaited)
            self._spawn(self._await_end(slot))
        except EngineLostError as lost:
            self._members.lose(member.name, lost.why)
        except Exception as error:  # noqa: BLE001  counted; the slot has no trainer
            self.failures.note("start", error)
            self._leases.retire(slot)

    async def _replace(self, slot: str) -> None:
        self._crashes[slot] += 1
        if self._crashes[slot] <= _MAX_CRASHES:
            await self._start(slot, awaited=False)
        else:
            self._journal.event("trainer_given_up", engine=slot, crashes=self._crashes[slot])
            self._leases.retire(slot)

    async def _await_end(self, slot: str) -> None:
        member = self._members.newest(slot)
        try:
            why = await self._trainers[slot].ended()
        except EngineLostError as lost:
            self._members.lose(member.name, lost.why)
            return
        except Exception as error:  # noqa: BLE001  counted; a trainer that cannot be watched is replaced
            self.failures.note("watch", error)
            why = repr(error)
        if self._members.newest(slot) is member:
            self._journal.event("trainer_lost", engine=slot, why=why)
            self._event(slot, Event.CRASHED)

    async def _keep_time(self) -> None:
        while True:
            changed, due_s = self._changed, self._leases.next_due_s()
            try:
                await asyncio.wait_for(changed.wait(), None if due_s is None else max(0.0, due_s - clock_s()))
            except TimeoutError:
                assert due_s is not None
                # The clock may be a rounding error short of the deadline.
                self._carry_out_all(self._leases.due(max(clock_s(), due_s)))

    def _cut_span(self, engine: str) -> None:
        label, began_s = self._span_began[engine]
        now_s = clock_s()
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
