"""Leases of idle engines' devices to drafter training: a state machine per engine.

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

A slot is the device of one engine, with the engine and a training worker, which runs only during a lease. slots.py
carries out the actions. The table and `Leases` keep four rules, which tests check exhaustively:

- Rollouts never wait for a trainer. From every state, an engine with work returns to BUSY by answers of its own process
  alone, which stops the worker with a signal. Answers have no deadline here, since a late answer is no failure.
- A worker may die at any time. Its death costs the lease, never the engine or a rollout.
- Events of a worker count only for the lease that they name: they may arrive during the next.
- A lease that takes longer to begin and to end than it leaves for training does not begin (`Leases._is_worth_it`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from statistics import median

from paceline.orchestrator.state_machine import Machine, StateMachines, complete

SETTLE_S = 0.02
"""Seconds of idleness before a lease: an engine is briefly idle between two rollouts."""
LEASE_S = 60.0
"""Longest lease; then the trainer is recalled even if the engine has no work."""


class LeaseState(Enum):
    BUSY = auto()
    IDLE = auto()
    """The engine is awake without rollouts."""
    DOZING = auto()
    ROUSED = auto()
    """The engine is falling asleep and has work; it cannot wake before it sleeps."""
    LEASED = auto()
    """The worker trains, or a new worker starts."""
    RECALLED = auto()
    WAKING = auto()
    LOST = auto()


class Event(Enum):
    WORK = auto()
    """The engine got rollouts."""
    DRAINED = auto()
    """The engine has finished all its rollouts."""
    PHASE_END = auto()
    """The learner needs the device, or a weight push follows, for which engines must be awake."""
    TIMEOUT = auto()
    SLEPT = auto()
    AWAKE = auto()
    LOST = auto()
    """The engine is lost; the worker may still run."""
    JOINED = auto()
    """A new engine took the place of a lost one; it has no worker yet."""
    STOPPED = auto()
    """The engine's process has stopped the worker."""
    CRASHED = auto()
    """The worker's process has ended; reported once per worker."""


class Action(Enum):
    SLEEP = auto()
    WAKE = auto()
    LEASE = auto()
    RECALL = auto()
    KILL = auto()
    """End the worker, which is reported as a crash."""
    REPLACE = auto()
    """Create a new worker, which starts in its first lease."""


Order = tuple[str, Action]
"""An engine, and the action to take on its slot."""

_CRASHED = {(state, Event.CRASHED): (state, (Action.REPLACE,)) for state in LeaseState if state is not LeaseState.LOST}
_LOST = {(state, Event.LOST): (LeaseState.LOST, (Action.KILL,)) for state in LeaseState if state is not LeaseState.LOST}
TABLE = complete(
    LeaseState,
    Event,
    _CRASHED
    | _LOST
    | {
        (LeaseState.BUSY, Event.DRAINED): (LeaseState.IDLE, ()),
        (LeaseState.IDLE, Event.WORK): (LeaseState.BUSY, ()),
        (LeaseState.IDLE, Event.TIMEOUT): (LeaseState.DOZING, (Action.SLEEP,)),
        (LeaseState.DOZING, Event.WORK): (LeaseState.ROUSED, ()),
        (LeaseState.DOZING, Event.PHASE_END): (LeaseState.ROUSED, ()),
        (LeaseState.DOZING, Event.SLEPT): (LeaseState.LEASED, (Action.LEASE,)),
        (LeaseState.ROUSED, Event.SLEPT): (LeaseState.WAKING, (Action.WAKE,)),
        (LeaseState.LEASED, Event.WORK): (LeaseState.RECALLED, (Action.RECALL,)),
        (LeaseState.LEASED, Event.PHASE_END): (LeaseState.RECALLED, (Action.RECALL,)),
        (LeaseState.LEASED, Event.TIMEOUT): (LeaseState.RECALLED, (Action.RECALL,)),
        (LeaseState.LEASED, Event.CRASHED): (LeaseState.WAKING, (Action.WAKE, Action.REPLACE)),
        (LeaseState.RECALLED, Event.STOPPED): (LeaseState.WAKING, (Action.WAKE,)),
        (LeaseState.RECALLED, Event.CRASHED): (LeaseState.WAKING, (Action.WAKE, Action.REPLACE)),
        (LeaseState.WAKING, Event.AWAKE): (LeaseState.IDLE, ()),
        (LeaseState.LOST, Event.JOINED): (LeaseState.IDLE, (Action.REPLACE,)),
    },
)
_REMEMBERED = 8
"""Idle times and leases that decide about the next lease."""
_ON_THE_WAY = (LeaseState.DOZING, LeaseState.ROUSED, LeaseState.RECALLED, LeaseState.WAKING)


def _recent() -> deque[float]:
    return deque(maxlen=_REMEMBERED)


@dataclass(slots=True, kw_only=True)
class Slot(Machine[LeaseState, Event, Action]):
    table = TABLE
    state: LeaseState = LeaseState.IDLE
    has_work: bool = False
    lease: int = 0
    retired: bool = False
    """The slot has no worker and gets none."""
    idle_s: float = 0.0
    """Length of the current idle time so far."""
    way_s: float = 0.0
    """Time that the last lease took to begin and to end."""
    idle_times_s: deque[float] = field(default_factory=_recent)
    way_times_s: deque[float] = field(default_factory=_recent)
    num_passed: int = 0
    """Consecutive idle times without a lease."""

    def fire(self, event: Event) -> tuple[Action, ...]:
        if event in (Event.WORK, Event.DRAINED):
            self.has_work = event is Event.WORK
        if event is Event.LOST:
            self.has_work = False  # other engines get its rollouts
        self.state, actions = TABLE[self.state, event]
        if self.state is LeaseState.IDLE and self.has_work:  # it came while the engine was waking
            self.state, _ = TABLE[LeaseState.IDLE, Event.WORK]
        self.lease += Action.LEASE in actions
        return actions


@dataclass(slots=True)
class Account:
    """Use of the engines' idle time, in seconds."""

    idle_s: float = 0.0
    """Time without rollouts in an open phase."""
    leasable_s: float = 0.0
    """The part of `idle_s` in which training was wanted."""
    leased_s: float = 0.0
    training_s: float = 0.0
    """Time inside micro-batches, reported by workers."""
    num_leases: int = 0
    num_recalls: int = 0
    num_crashes: int = 0
    """Workers that ended before the run, for any reason."""
    unleased_cpu_s: float = 0.0
    """CPU time that workers used without a lease, reported by the owners of their processes."""
    stall_s: float = 0.0
    """Time in which rollouts waited for their engine, or the run for the end of leases."""
    recall_s: list[float] = field(default_factory=list[float])
    """Times from rollouts for a sleeping engine until it was awake, since the last report."""


class Leases(StateMachines[Slot, LeaseState, Event, Action]):
    """The slots of a fleet and their account."""

    def __init__(self, engines: Sequence[str], *, skip_short: bool = True) -> None:
        """Without `skip_short`, every lease begins, however short it may be."""
        super().__init__({engine: Slot() for engine in engines})
        self._skip_short = skip_short
        self._wanted_since_s: dict[str, float] = {}
        self._now_s = 0.0
        self._open: set[str] = set()
        self.training_wanted = False
        self.account = Account()

    def lease(self, engine: str) -> int:
        """Return the number of the engine's last lease, which its worker's events must name."""
        return self._machines[engine].lease

    def retire(self, engine: str) -> None:
        """Begin no lease of this slot until another engine takes it."""
        self._machines[engine].retired = True

    def announce(
        self,
        *,
        now_s: float,
        phase_open: bool | None = None,
        engines: Collection[str] | None = None,
        training_wanted: bool | None = None,
    ) -> list[Order]:
        """Open or close the phase in which the devices of these engines, by default all, may be leased.

        While a phase is open and training is wanted, idle engines fall asleep once they have settled. Otherwise their
        leases end.
        """
        self._pass_time(now_s)
        before = {engine for engine in self._machines if self._on(engine)}
        if phase_open is not None:
            named = set(self._machines if engines is None else engines)
            self._open = self._open | named if phase_open else self._open - named
        self.training_wanted = self.training_wanted if training_wanted is None else training_wanted
        after = {engine for engine in self._machines if self._on(engine)}
        for engine in after - before:
            if self._machines[engine].state is LeaseState.IDLE:
                self._machines[engine].since_s = now_s
        for engine in before - after:
            self._end_idle_time(self._machines[engine])
        return [
            order
            for engine in self._machines
            if engine in before - after
            for order in self.on(engine, Event.PHASE_END, now_s)
        ]

    def on(self, name: str, event: Event, now_s: float, *, lease: int | None = None) -> list[Order]:
        """Return the actions that follow from an event; STOPPED counts only for the current `lease`."""
        self._pass_time(now_s)
        slot = self._machines[name]
        if event is Event.STOPPED and lease != slot.lease:
            return []
        before = slot.state
        if event is Event.LOST:
            self._wanted_since_s.pop(name, None)
        elif event is Event.JOINED:
            slot.retired = False
        elif event is Event.WORK:
            self._end_idle_time(slot)
        orders = super().on(name, event, now_s)
        self._count(name, event, before, [action for _, action in orders], now_s)
        return orders

    def _timer(self, name: str) -> tuple[float, Event] | None:
        slot = self._machines[name]
        match slot.state:
            case LeaseState.IDLE if self._on(name) and not slot.retired and self._is_worth_it(slot):
                return slot.since_s + SETTLE_S, Event.TIMEOUT
            case LeaseState.LEASED:
                return slot.since_s + LEASE_S, Event.TIMEOUT
            case _:
                return None

    def _on(self, engine: str) -> bool:
        return engine in self._open and self.training_wanted

    def _is_worth_it(self, slot: Slot) -> bool:
        """Return whether a lease would leave at least as much time for training as it takes to begin and to end, judged
        by the slot's last idle times and leases. The length of a slice is irrelevant: the next lease resumes it."""
        if not self._skip_short or not slot.idle_times_s or not slot.way_times_s:
            return True
        return median(slot.idle_times_s) - SETTLE_S >= 2 * median(slot.way_times_s)

    def _end_idle_time(self, slot: Slot) -> None:
        """Remember how long the slot was idle, except for moments between two rollouts."""
        if slot.idle_s > SETTLE_S:
            slot.idle_times_s.append(slot.idle_s)
            slot.num_passed = slot.num_passed + 1 if slot.state is LeaseState.IDLE else 0
            if slot.num_passed == _REMEMBERED:
                slot.way_times_s.clear()  # outdated: the next lease measures it again
        slot.idle_s = 0.0

    def _pass_time(self, now_s: float) -> None:
        """Account for the time since the last event."""
        passed_s, self._now_s = now_s - self._now_s, now_s
        for engine, slot in self._machines.items():
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
        account, slot = self.account, self._machines[engine]
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
