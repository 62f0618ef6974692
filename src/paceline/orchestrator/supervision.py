"""Engine health by heartbeats, and restarts within a budget: a state machine per place.

                 late                 died, silent (lose)
    HEALTHY ◀────────────▶ SUSPECT ──────────────┐
       ▲  │      beat                            ▼      backoff over (start)                started (catch up)
       │  │               died                 LOST ─────────────────────────▶ STARTING ─────────────────────┐
       │  └─────────────────────────────────▶   │ ▲                              │                           ▼
       │                    budget spent        │ └───────── failed, died ───────┴─────────────────────── CATCHING_UP
       │                      (give up)         ▼                                                            │
       │                                     GIVEN_UP                                                        │
       └──────────────────────────────────────── joined ─────────────────────────────────────────────────────┘

A live engine answers a heartbeat every `BEAT_S`; rollout/pulse.py defines "live". One late answer has no consequence,
since a process may wait for a core. An engine that is silent for `SILENT_S` is lost. healing.py carries out the
actions.

Each place has a budget of consecutive starts, so that an engine that dies at every start is not restarted forever. An
engine that stays healthy for `STEADY_S` restores the budget. The wait before a start doubles each time, unless the last
engine was healthy for `SOUND_S`: then its start was not the cause of its death.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from paceline.orchestrator.state_machine import Machine, StateMachines, complete

BEAT_S = 2.0
LATE_S = 5.0
SILENT_S = 12.0
FIRST_BACKOFF_S = 10.0
"""Wait before the second start in a row; the first start is immediate."""
LONGEST_BACKOFF_S = 300.0
STEADY_S = 600.0
SOUND_S = 30.0


class Health(Enum):
    HEALTHY = auto()
    SUSPECT = auto()
    """The last heartbeat is late."""
    LOST = auto()
    """No engine runs here; the next start waits for its backoff."""
    STARTING = auto()
    CATCHING_UP = auto()
    """The new engine runs and does not have the policy yet."""
    GIVEN_UP = auto()


class HealthEvent(Enum):
    BEAT = auto()
    DIED = auto()
    """A heartbeat or any other call found the engine gone."""
    TIMEOUT = auto()
    BUDGET_SPENT = auto()
    """A start is due and none is left."""
    STARTED = auto()
    FAILED = auto()
    """The new engine did not start, or refused the policy."""
    JOINED = auto()


class RecoveryAction(Enum):
    LOSE = auto()
    """Stop using the silent engine."""
    START = auto()
    CATCH_UP = auto()
    """Send the current policy to the new engine, which then joins."""
    GIVE_UP = auto()


RecoveryOrder = tuple[str, RecoveryAction]
"""A place, and the action to take there."""

TABLE = complete(
    Health,
    HealthEvent,
    {
        (Health.HEALTHY, HealthEvent.TIMEOUT): (Health.SUSPECT, ()),
        (Health.HEALTHY, HealthEvent.DIED): (Health.LOST, ()),
        (Health.SUSPECT, HealthEvent.BEAT): (Health.HEALTHY, ()),
        (Health.SUSPECT, HealthEvent.TIMEOUT): (Health.LOST, (RecoveryAction.LOSE,)),
        (Health.SUSPECT, HealthEvent.DIED): (Health.LOST, ()),
        (Health.LOST, HealthEvent.TIMEOUT): (Health.STARTING, (RecoveryAction.START,)),
        (Health.LOST, HealthEvent.BUDGET_SPENT): (Health.GIVEN_UP, (RecoveryAction.GIVE_UP,)),
        (Health.STARTING, HealthEvent.STARTED): (Health.CATCHING_UP, (RecoveryAction.CATCH_UP,)),
        (Health.STARTING, HealthEvent.FAILED): (Health.LOST, ()),
        (Health.CATCHING_UP, HealthEvent.FAILED): (Health.LOST, ()),
        (Health.CATCHING_UP, HealthEvent.DIED): (Health.LOST, ()),
        (Health.CATCHING_UP, HealthEvent.JOINED): (Health.HEALTHY, ()),
    },
)


@dataclass(slots=True, kw_only=True)
class _Place(Machine[Health, HealthEvent, RecoveryAction]):
    table = TABLE
    state: Health = Health.HEALTHY
    heard_s: float = 0.0
    """Time of the last heartbeat."""
    lost_s: float = 0.0
    """Time of the last loss of a healthy engine."""
    joined_s: float = 0.0
    incarnation: int = 1
    starts: int = 0
    """Consecutive starts."""
    futile_starts: int = 0
    """Consecutive starts since the last engine that was healthy for `SOUND_S`."""


class EngineSupervisor(StateMachines[_Place, Health, HealthEvent, RecoveryAction]):
    def __init__(self, places: Sequence[str], *, max_restarts: int) -> None:
        super().__init__({place: _Place() for place in places})
        self._max_restarts = max_restarts

    def incarnation(self, place: str) -> int:
        """Return the number of the place's newest engine, counted from 1."""
        return self._machines[place].incarnation

    def downtime_s(self, place: str) -> float:
        """Return how long the place was last without an engine."""
        found = self._machines[place]
        return found.joined_s - found.lost_s

    def begin(self, now_s: float) -> None:
        """Take every engine to be healthy now."""
        for place in self._machines.values():
            place.since_s = place.heard_s = place.joined_s = now_s

    def on(self, name: str, event: HealthEvent, now_s: float) -> list[RecoveryOrder]:
        place = self._machines[name]
        before = place.state
        orders = super().on(name, event, now_s)
        if event in (HealthEvent.BEAT, HealthEvent.JOINED):
            place.heard_s = now_s
        if event is HealthEvent.JOINED:
            place.joined_s = now_s
        if place.state is Health.LOST and before in (Health.HEALTHY, Health.SUSPECT):
            place.lost_s = now_s
            if now_s - place.joined_s >= STEADY_S:
                place.starts = 0
            if now_s - place.joined_s >= SOUND_S:
                place.futile_starts = 0
        if (name, RecoveryAction.START) in orders:
            place.starts += 1
            place.futile_starts += 1
            place.incarnation += 1
        return orders

    def _timer(self, name: str) -> tuple[float, HealthEvent] | None:
        place = self._machines[name]
        match place.state:
            case Health.HEALTHY:
                return place.heard_s + LATE_S, HealthEvent.TIMEOUT
            case Health.SUSPECT:
                return place.heard_s + SILENT_S, HealthEvent.TIMEOUT
            case Health.LOST if place.starts == self._max_restarts:
                return place.since_s, HealthEvent.BUDGET_SPENT
            case Health.LOST:
                again = place.futile_starts
                backoff_s = min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2 ** (again - 1)) if again else 0.0
                return place.since_s + backoff_s, HealthEvent.TIMEOUT
            case _:
                return None
