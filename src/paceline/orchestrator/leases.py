"""Leases of idle engines' devices to drafter training, and their recall: pure logic without a clock of its own.

    BUSY ──drained──▶ IDLE ──settled──▶ DOZING ──slept──▶ LEASED ──────┐ work, phase end, lease over
     ▲                 ▲     (sleep)       │     (lease)    │           ▼ (recall)
     │                 │            work, phase end    crashed      RECALLED
     │                 │                   ▼       (wake, replace)     │ stopped (wake),
     │                 │                ROUSED              │          │ crashed (wake, replace)
     │                 │                   │ slept (wake)   ▼          │
     │                 │                   └───────────▶ WAKING ◀──────┘
     │                 └─────── awake, if none do ──────────┤
     └───── awake, if rollouts wait ────────────────────────┘
    every state ──lost (kill)──▶ LOST ──joined (replace)──▶ IDLE

A slot is one engine's device with the engine and a training worker, which runs while it has a lease and at no other
time. What follows from which event is one table, `TABLE`; slots.py carries out the actions that it answers and reports
what comes of them. Four rules are in the table and in `Leases`, and tests go through all of it for them:

- Rollouts wait for no trainer. From every state an engine with work gets back to BUSY by the answers of its own process
  alone, which stops the worker with a signal. No answer has a deadline here: one that is late was held up on its way,
  and nobody is killed for that.
- A worker may die at any moment. It costs the slot's lease, never the engine or a rollout.
- A word about a worker counts only for the lease that it is about: it may arrive in the middle of the next.
- A lease that takes longer to begin and to end than it leaves for training is not begun (`Leases._is_worth_it`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from statistics import median

from paceline.config import LeaseConfig


class LeaseState(Enum):
    BUSY = auto()
    """The engine has rollouts."""
    IDLE = auto()
    """The engine is awake without rollouts."""
    DOZING = auto()
    """The engine was told to sleep."""
    ROUSED = auto()
    """The engine was told to sleep, and is wanted again; it cannot be woken before it sleeps."""
    LEASED = auto()
    """The worker runs: it trains, or one that replaces another starts."""
    RECALLED = auto()
    """The worker was told to let go."""
    WAKING = auto()
    LOST = auto()


class Event(Enum):
    WORK = auto()
    """Rollouts were given to the engine."""
    DRAINED = auto()
    """The engine has finished all its rollouts."""
    PHASE_END = auto()
    """The learner needs the device, or weights come next, for which an engine must be awake."""
    TIME_UP = auto()
    """The time of the state is over: see `Leases.due`."""
    SLEPT = auto()
    AWAKE = auto()
    LOST = auto()
    """The engine is lost; the worker need not be."""
    JOINED = auto()
    """Another engine has taken its place; it has no worker yet."""
    STOPPED = auto()
    """The worker was stopped, as the engine's process says."""
    CRASHED = auto()
    """The worker's process has ended; reported once for each worker."""


FROM_WORKER = frozenset({Event.STOPPED})
"""Events that are about one lease and mean nothing in another."""


class Action(Enum):
    SLEEP = auto()
    WAKE = auto()
    LEASE = auto()
    RECALL = auto()
    KILL = auto()
    """End the worker; that is reported as any other crash."""
    REPLACE = auto()
    """Make a new worker, which starts in its first lease."""


Answer = tuple[LeaseState, tuple[Action, ...]]


def _table() -> dict[tuple[LeaseState, Event], Answer]:
    """Every state x every event. What is not named below changes nothing: the right answer to a late message."""
    table: dict[tuple[LeaseState, Event], Answer] = {
        (state, event): (state, ()) for state in LeaseState for event in Event
    }
    for state in LeaseState:
        if state is not LeaseState.LOST:
            table[state, Event.CRASHED] = (state, (Action.REPLACE,))
            table[state, Event.LOST] = (LeaseState.LOST, (Action.KILL,))
    table |= {
        (LeaseState.BUSY, Event.DRAINED): (LeaseState.IDLE, ()),
        (LeaseState.IDLE, Event.WORK): (LeaseState.BUSY, ()),
        (LeaseState.IDLE, Event.TIME_UP): (LeaseState.DOZING, (Action.SLEEP,)),
        (LeaseState.DOZING, Event.WORK): (LeaseState.ROUSED, ()),
        (LeaseState.DOZING, Event.PHASE_END): (LeaseState.ROUSED, ()),
        (LeaseState.DOZING, Event.SLEPT): (LeaseState.LEASED, (Action.LEASE,)),
        (LeaseState.ROUSED, Event.SLEPT): (LeaseState.WAKING, (Action.WAKE,)),
        (LeaseState.LEASED, Event.WORK): (LeaseState.RECALLED, (Action.RECALL,)),
        (LeaseState.LEASED, Event.PHASE_END): (LeaseState.RECALLED, (Action.RECALL,)),
        (LeaseState.LEASED, Event.TIME_UP): (LeaseState.RECALLED, (Action.RECALL,)),
        (LeaseState.LEASED, Event.CRASHED): (LeaseState.WAKING, (Action.WAKE, Action.REPLACE)),
        (LeaseState.RECALLED, Event.STOPPED): (LeaseState.WAKING, (Action.WAKE,)),
        (LeaseState.RECALLED, Event.CRASHED): (LeaseState.WAKING, (Action.WAKE, Action.REPLACE)),
        (LeaseState.LOST, Event.JOINED): (LeaseState.IDLE, (Action.REPLACE,)),
        (LeaseState.WAKING, Event.AWAKE): (LeaseState.IDLE, ()),  # BUSY if rollouts wait: `Slot` knows
    }
    return table


TABLE = _table()
_REMEMBERED = 8
"""Idle times, and leases, by which the next ones are judged."""
_ON_THE_WAY = (LeaseState.DOZING, LeaseState.ROUSED, LeaseState.RECALLED, LeaseState.WAKING)


def _recent() -> deque[float]:
    return deque(maxlen=_REMEMBERED)


@dataclass(slots=True)
class Slot:
    """State of one engine's device."""

    state: LeaseState = LeaseState.IDLE
    has_work: bool = False
    lease: int = 0
    """Number of the present or last lease."""
    since_s: float = 0.0
    retired: bool = False
    """It has no worker, and gets none."""
    idle_s: float = 0.0
    """Length of the present idle time so far."""
    way_s: float = 0.0
    """Time that its present or last lease took to begin and to end."""
    idle_times_s: deque[float] = field(default_factory=_recent)
    way_times_s: deque[float] = field(default_factory=_recent)
    num_passed: int = 0
    """Idle times in a row without a lease."""

    def on(self, event: Event, lease: int | None = None) -> tuple[Action, ...]:
        if event in FROM_WORKER and lease != self.lease:
            return ()
        if event in (Event.WORK, Event.DRAINED):
            self.has_work = event is Event.WORK
        if event is Event.LOST:
            self.has_work = False  # they are given to others
        self.state, actions = TABLE[self.state, event]
        if self.state is LeaseState.IDLE and self.has_work:  # came while the engine was waking
            self.state = LeaseState.BUSY
        self.lease += Action.LEASE in actions
        return actions


@dataclass(slots=True)
class Account:
    """Where the idle time of engines went, in seconds."""

    idle_s: float = 0.0
    """Time without rollouts in an open phase."""
    leasable_s: float = 0.0
    """That of it in which training was wanted, whatever the slot was doing."""
    leased_s: float = 0.0
    training_s: float = 0.0
    """Time inside micro-batches, as workers report it."""
    num_leases: int = 0
    num_recalls: int = 0
    num_crashes: int = 0
    """Workers that ended before the run did, whoever ended them."""
    unleased_cpu_s: float = 0.0
    """CPU time that workers have used without a lease, as the owners of their processes report it."""
    stall_s: float = 0.0
    """Time for which rollouts waited for their engine, or the run for the end of leases."""
    recall_s: list[float] = field(default_factory=list)
    """Times from rollouts for an engine that was not awake until it was; whoever reports them takes them out."""


Order = tuple[str, Action]
"""An engine, and what to do about its slot."""


class Leases:
    """All slots of a fleet, their timers and their account. The caller passes its clock in, and calls `due` in time."""

    def __init__(self, engines: Sequence[str], config: LeaseConfig, *, choosy: bool = True) -> None:
        """One that is not `choosy` begins every lease: whoever opens the phase waits for them."""
        self._config = config
        self._choosy = choosy
        self._slots = {engine: Slot() for engine in engines}
        self._wanted_since_s: dict[str, float] = {}
        self._now_s = 0.0
        self._open: set[str] = set()
        self.training_wanted = False
        self.account = Account()

    def state(self, engine: str) -> LeaseState:
        return self._slots[engine].state

    def lease(self, engine: str) -> int:
        """Number of its present or last lease, for the worker to sign its reports with."""
        return self._slots[engine].lease

    def retire(self, engine: str) -> None:
        """No lease of this slot begins any more, until another engine takes it."""
        self._slots[engine].retired = True

    def announce(
        self,
        *,
        now_s: float,
        phase_open: bool | None = None,
        engines: Collection[str] | None = None,
        training_wanted: bool | None = None,
    ) -> list[Order]:
        """Open or close the phase in which the devices of these engines, or of all, may be leased; say whether there
        is anything to train, and reason to. Idle engines then sleep when they have settled. Those whose phase closes
        are called back, and so are all when training is not wanted any more."""
        self._pass_time(now_s)
        before = {engine for engine in self._slots if self._on(engine)}
        if phase_open is not None:
            named = set(self._slots if engines is None else engines)
            self._open = self._open | named if phase_open else self._open - named
        self.training_wanted = self.training_wanted if training_wanted is None else training_wanted
        after = {engine for engine in self._slots if self._on(engine)}
        for engine in after - before:
            if self._slots[engine].state is LeaseState.IDLE:
                self._slots[engine].since_s = now_s
        for engine in before - after:
            self._end_idle_time(self._slots[engine])
        return [
            order
            for engine in self._slots
            if engine in before - after
            for order in self.on(engine, Event.PHASE_END, now_s)
        ]

    def on(self, engine: str, event: Event, now_s: float, *, lease: int | None = None) -> list[Order]:
        """What to do about an event. A worker signs with the number of its lease."""
        self._pass_time(now_s)
        slot = self._slots[engine]
        before = slot.state
        if event is Event.LOST:
            self._wanted_since_s.pop(engine, None)
        elif event is Event.JOINED:
            slot.retired = False
        elif event is Event.WORK:
            self._end_idle_time(slot)
        actions = slot.on(event, lease)
        self._count(engine, event, before, actions, now_s)
        if slot.state is not before:
            slot.since_s = now_s
        return [(engine, action) for action in actions]

    def due(self, now_s: float) -> list[Order]:
        """Actions for every slot whose time in its state is up."""
        ready = [engine for engine in self._slots if (at_s := self._due_s(engine)) is not None and at_s <= now_s]
        return [order for engine in ready for order in self.on(engine, Event.TIME_UP, now_s)]

    def next_due_s(self) -> float | None:
        """When `due` has to be called next; None if no timer runs."""
        return min((at_s for engine in self._slots if (at_s := self._due_s(engine)) is not None), default=None)

    def _due_s(self, engine: str) -> float | None:
        slot = self._slots[engine]
        match slot.state:
            case LeaseState.IDLE if self._on(engine) and not slot.retired and self._is_worth_it(slot):
                return slot.since_s + self._config.settle_s
            case LeaseState.LEASED:
                return slot.since_s + self._config.lease_s
            case _:
                return None

    def _on(self, engine: str) -> bool:
        return engine in self._open and self.training_wanted

    def _is_worth_it(self, slot: Slot) -> bool:
        """Whether a lease would leave at least as much time for training as it takes to begin and to end, by the
        slot's last idle times and leases. How long a slice takes does not matter: it goes on in the next lease."""
        if not self._choosy or not slot.idle_times_s or not slot.way_times_s:
            return True
        return median(slot.idle_times_s) - self._config.settle_s >= 2 * median(slot.way_times_s)

    def _end_idle_time(self, slot: Slot) -> None:
        """Remember how long the slot was idle, unless that was a moment between two rollouts."""
        if slot.idle_s > self._config.settle_s:
            slot.idle_times_s.append(slot.idle_s)
            slot.num_passed = slot.num_passed + 1 if slot.state is LeaseState.IDLE else 0
            if slot.num_passed == _REMEMBERED:
                slot.way_times_s.clear()  # what was measured has grown old: the next lease measures it again
        slot.idle_s = 0.0

    def _pass_time(self, now_s: float) -> None:
        """Book the time since the last event, in which no slot changed."""
        passed_s, self._now_s = now_s - self._now_s, now_s
        for engine, slot in self._slots.items():
            slot.way_s += passed_s if slot.state in _ON_THE_WAY else 0.0
            if slot.state is LeaseState.LOST or slot.has_work or engine not in self._open:
                continue
            self.account.idle_s += passed_s
            if not self.training_wanted:
                continue
            slot.idle_s += passed_s
            self.account.leasable_s += passed_s
            if slot.state is LeaseState.LEASED:
                self.account.leased_s += passed_s

    def _count(self, engine: str, event: Event, before: LeaseState, actions: Sequence[Action], now_s: float) -> None:
        account, slot = self.account, self._slots[engine]
        after = slot.state
        account.num_leases += Action.LEASE in actions
        account.num_recalls += Action.RECALL in actions
        account.num_crashes += event is Event.CRASHED
        if event is Event.AWAKE and before is LeaseState.WAKING:
            slot.way_times_s.append(slot.way_s)
            slot.way_s = 0.0
        if event is Event.WORK and after is not LeaseState.BUSY:
            self._wanted_since_s.setdefault(engine, now_s)
        elif after is LeaseState.BUSY and before is not LeaseState.BUSY and engine in self._wanted_since_s:
            account.recall_s.append(now_s - self._wanted_since_s.pop(engine))
            account.stall_s += account.recall_s[-1]
