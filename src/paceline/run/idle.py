"""Leases of idle engines to drafter training, and their recall: pure logic, no ray, no vllm, no clock of its own.

                              ┌───────────────────────────── work ──────────────────────────────┐
    BUSY ──drained──▶ IDLE ──settled──▶ DOZING ──slept──▶ ASLEEP ──ready──▶ LEASED              │
     ▲                 ▲   (sleep)         │   (offer)      │     (lease)     │ work, phase end, │
     │                 │              work, phase end   work, phase end       │ lease over       │
     │                 │                   ▼                │                 ▼ (recall)         │
     │                 │                ROUSED ──slept──┐   │ (wake)       RECALLED              │
     │                 │                         (wake) ▼   ▼                 │ stopped, crashed,│
     └───── awake, if rollouts wait ───────────────── WAKING ◀──── (wake) ────┘ grace over (kill)┘
                       └──── awake, if none do ─────────┘

Every engine has a training worker beside it, which holds the engine's place while it is leased. What follows from which event is
one table, `TABLE`; whoever conducts carries out the actions that it answers and reports what comes of them. Three rules are in the
table, and tests go through all of it for them:

- Rollouts wait for no trainer. From every state an engine with work gets back to BUSY by its own answers and the clock alone: a
  worker that does not let go within `grace_s` is killed. It writes nothing before it lets go.
- A worker may die at any moment. It costs the place's lease, never the engine or a rollout.
- A worker's word counts only for the lease that it holds: what was sent before a kill may arrive in the middle of the next lease.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from paceline.config import LeaseConfig


class State(Enum):
    BUSY = auto()
    """Has rollouts."""
    IDLE = auto()
    """Awake, without any."""
    DOZING = auto()
    """Was told to sleep."""
    ROUSED = auto()
    """Was told to sleep, and is wanted again; an engine cannot be woken before it sleeps."""
    ASLEEP = auto()
    """Nobody holds its place: the worker was asked, or is being replaced."""
    LEASED = auto()
    """A worker trains in its place."""
    RECALLED = auto()
    """The worker was told to let go."""
    WAKING = auto()
    LOST = auto()


class Event(Enum):
    WORK = auto()
    """Rollouts were given to the engine."""
    DRAINED = auto()
    """It has finished all of them."""
    PHASE_END = auto()
    """The learner needs its place, or weights come next, for which an engine must be awake."""
    TIME_UP = auto()
    """The time of the state is over: see `Leases.due`."""
    SLEPT = auto()
    AWAKE = auto()
    LOST = auto()
    """The engine is; not the worker."""
    READY = auto()
    """The worker could take the place."""
    STOPPED = auto()
    """The worker has let go, as it was told or because there is nothing to train on."""
    CRASHED = auto()
    """The worker's process has ended; reported once for each worker."""


FROM_WORKER = frozenset({Event.STOPPED})
"""Events that are about one lease and mean nothing in another. READY is about none, and no worker outlives its crash."""


class Action(Enum):
    SLEEP = auto()
    WAKE = auto()
    OFFER = auto()
    """Ask the worker whether it is ready. One that is being replaced says so when it is there."""
    LEASE = auto()
    RECALL = auto()
    KILL = auto()
    """The worker; its end is reported as any other crash."""
    REPLACE = auto()
    """Start a new worker."""


Answer = tuple[State, tuple[Action, ...]]


def _table() -> dict[tuple[State, Event], Answer]:
    """Every state x every event. What is not named below changes nothing, which is the answer to a message that comes too late."""
    table: dict[tuple[State, Event], Answer] = {(state, event): (state, ()) for state in State for event in Event}
    for state in State:
        if state is not State.LOST:
            table[state, Event.CRASHED] = (state, (Action.REPLACE,))
            table[state, Event.LOST] = (State.LOST, (Action.KILL,))
    table |= {
        (State.BUSY, Event.DRAINED): (State.IDLE, ()),
        (State.IDLE, Event.WORK): (State.BUSY, ()),
        (State.IDLE, Event.TIME_UP): (State.DOZING, (Action.SLEEP,)),
        (State.DOZING, Event.WORK): (State.ROUSED, ()),
        (State.DOZING, Event.PHASE_END): (State.ROUSED, ()),
        (State.DOZING, Event.SLEPT): (State.ASLEEP, (Action.OFFER,)),
        (State.ROUSED, Event.SLEPT): (State.WAKING, (Action.WAKE,)),
        (State.ASLEEP, Event.WORK): (State.WAKING, (Action.WAKE,)),
        (State.ASLEEP, Event.PHASE_END): (State.WAKING, (Action.WAKE,)),
        (State.ASLEEP, Event.READY): (State.LEASED, (Action.LEASE,)),
        (State.LEASED, Event.WORK): (State.RECALLED, (Action.RECALL,)),
        (State.LEASED, Event.PHASE_END): (State.RECALLED, (Action.RECALL,)),
        (State.LEASED, Event.TIME_UP): (State.RECALLED, (Action.RECALL,)),
        (State.LEASED, Event.STOPPED): (State.WAKING, (Action.WAKE,)),
        (State.LEASED, Event.CRASHED): (State.ASLEEP, (Action.REPLACE,)),
        (State.RECALLED, Event.STOPPED): (State.WAKING, (Action.WAKE,)),
        (State.RECALLED, Event.CRASHED): (State.WAKING, (Action.WAKE, Action.REPLACE)),
        (State.RECALLED, Event.TIME_UP): (State.WAKING, (Action.KILL, Action.WAKE)),
        (State.WAKING, Event.AWAKE): (State.IDLE, ()),  # BUSY if rollouts wait: `Place` knows
    }
    return table


TABLE = _table()


@dataclass(slots=True)
class Place:
    """One engine and the worker beside it."""

    state: State = State.IDLE
    has_work: bool = False
    lease: int = 0
    """Number of the present or last lease."""
    since_s: float = 0.0

    def on(self, event: Event, lease: int | None = None) -> tuple[Action, ...]:
        if event in FROM_WORKER and lease != self.lease:
            return ()
        if event in (Event.WORK, Event.DRAINED):
            self.has_work = event is Event.WORK
        self.state, actions = TABLE[self.state, event]
        if self.state is State.IDLE and self.has_work:  # came while the engine was waking
            self.state = State.BUSY
        self.lease += Action.LEASE in actions
        return actions


@dataclass(slots=True)
class Account:
    """Where the idle time of engines went, in seconds."""

    leasable_s: float = 0.0
    """Without work in an open phase while training was wanted, whatever the place was doing."""
    leased_s: float = 0.0
    training_s: float = 0.0
    """Of it spent inside micro-batches, as workers report."""
    num_leases: int = 0
    num_recalls: int = 0
    num_kills: int = 0
    num_crashes: int = 0
    recall_s: list[float] = field(default_factory=list)
    """From work for a place that was not awake until its engine was."""


Order = tuple[str, Action]


class Leases:
    """All places of a fleet, their timers and their account. The caller's clock is passed in, and `due` is called when it says."""

    def __init__(self, engines: Sequence[str], config: LeaseConfig) -> None:
        self._config = config
        self._places = {engine: Place() for engine in engines}
        self._wanted_since_s: dict[str, float] = {}
        self._now_s = 0.0
        self._open: set[str] = set()
        self.training_wanted = False
        self.account = Account()

    def state(self, engine: str) -> State:
        return self._places[engine].state

    def lease(self, engine: str) -> int:
        """Number of its present or last lease, for the worker to sign its reports with."""
        return self._places[engine].lease

    def announce(
        self,
        *,
        now_s: float,
        phase_open: bool | None = None,
        engines: Collection[str] | None = None,
        training_wanted: bool | None = None,
    ) -> list[Order]:
        """Open or close the phase in which places may be lent, of these engines or of all; say whether there is anything to train,
        and reason to. Idle engines then sleep when they have settled; those whose phase closes are called back, and so are all
        when training is not wanted any more."""
        self._pass_time(now_s)
        before = {engine for engine in self._places if self._on(engine)}
        if phase_open is not None:
            named = set(self._places if engines is None else engines)
            self._open = self._open | named if phase_open else self._open - named
        self.training_wanted = self.training_wanted if training_wanted is None else training_wanted
        after = {engine for engine in self._places if self._on(engine)}
        for engine in after - before:
            if self._places[engine].state is State.IDLE:
                self._places[engine].since_s = now_s
        return [order for engine in self._places if engine in before - after for order in self.on(engine, Event.PHASE_END, now_s)]

    def on(self, engine: str, event: Event, now_s: float, *, lease: int | None = None) -> list[Order]:
        """What to do about an event. A worker signs with the number of its lease."""
        self._pass_time(now_s)
        place = self._places[engine]
        before = place.state
        actions = place.on(event, lease)
        self._count(engine, event, before, actions, now_s)
        if place.state is not before:
            place.since_s = now_s
        return [(engine, action) for action in actions]

    def due(self, now_s: float) -> list[Order]:
        """Actions for every place whose time in its state is up."""
        ready = [engine for engine in self._places if (at_s := self._due_s(engine)) is not None and at_s <= now_s]
        return [order for engine in ready for order in self.on(engine, Event.TIME_UP, now_s)]

    def next_due_s(self) -> float | None:
        """When `due` has to be called next; None if no timer runs."""
        return min((at_s for engine in self._places if (at_s := self._due_s(engine)) is not None), default=None)

    def _due_s(self, engine: str) -> float | None:
        place = self._places[engine]
        match place.state:
            case State.IDLE:
                return place.since_s + self._config.settle_s if self._on(engine) else None
            case State.LEASED:
                return place.since_s + self._config.lease_s
            case State.RECALLED:
                return place.since_s + self._config.grace_s
            case _:
                return None

    def _on(self, engine: str) -> bool:
        return engine in self._open and self.training_wanted

    def _pass_time(self, now_s: float) -> None:
        """Book the time since the last event, in which no place changed."""
        passed_s, self._now_s = now_s - self._now_s, now_s
        for engine, place in self._places.items():
            if place.state is State.LOST or place.has_work or not self._on(engine):
                continue
            self.account.leasable_s += passed_s
            if place.state is State.LEASED:
                self.account.leased_s += passed_s

    def _count(self, engine: str, event: Event, before: State, actions: Sequence[Action], now_s: float) -> None:
        account, after = self.account, self._places[engine].state
        account.num_leases += Action.LEASE in actions
        account.num_recalls += Action.RECALL in actions
        account.num_kills += Action.KILL in actions and after is not State.LOST
        account.num_crashes += event is Event.CRASHED
        if event is Event.WORK and after is not State.BUSY:
            self._wanted_since_s.setdefault(engine, now_s)
        elif after is State.BUSY and before is not State.BUSY and engine in self._wanted_since_s:
            account.recall_s.append(now_s - self._wanted_since_s.pop(engine))
