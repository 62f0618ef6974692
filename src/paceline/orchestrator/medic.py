"""Which engines are well, and when one that was lost is started again: pure logic without a clock of its own.

                 late                 died, silence over (lose)
    HEALTHY ◀────────────▶ SUSPECT ──────────────┐
       │  ▲      beat                            ▼       backoff over (start)               started (catch up)
       │  │               died                 LOST ─────────────────────────▶ STARTING ─────────────────────┐
       └──┼─────────────────────────────────▶   │ ▲                              │                           ▼
          │                   budget spent      │ └───────── failed, died ───────┴─────────────────────── CATCHING_UP
          │                      (give up)      ▼                                                            │
          │                                  GIVEN_UP                                                        │
          └──────────────────────────────────────── joined ──────────────────────────────────────────────────┘

An engine that is alive answers a heartbeat every `BEAT_S`; what has to be alive for that, `rollout/pulse.py` says. One
late answer is nothing: a process may wait for a core. Only one that is silent for `SILENT_S` is lost. What follows from
which event is one table, `TABLE`; healing.py carries out the actions that it answers and reports what comes of them.

A place has a budget of starts in a row: an engine that dies at every start would otherwise be started for ever. One
that has been well for `STEADY_S` has its budget back. Each start waits twice as long as the one before, unless the
engine was well for `SOUND_S`: whatever it died of then, it was not its start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

BEAT_S = 2.0
LATE_S = 5.0
SILENT_S = 12.0
FIRST_BACKOFF_S = 10.0
"""Wait before the second start in a row; the first comes at once."""
LONGEST_BACKOFF_S = 300.0
STEADY_S = 600.0
SOUND_S = 30.0


class Health(Enum):
    HEALTHY = auto()
    SUSPECT = auto()
    """The last heartbeat is late."""
    LOST = auto()
    """Nothing runs there; the next start waits for its time."""
    STARTING = auto()
    CATCHING_UP = auto()
    """The new engine is there, and does not have the policy yet."""
    GIVEN_UP = auto()


class Sign(Enum):
    BEAT = auto()
    DIED = auto()
    """Somebody found that the engine is gone; heartbeats are not the only ones."""
    TIME_UP = auto()
    """The time of the state is over: see `Medic.due`."""
    STARTED = auto()
    FAILED = auto()
    """The new engine did not start, or did not take the policy."""
    JOINED = auto()


class Treatment(Enum):
    LOSE = auto()
    """Nothing more is asked of the engine that is silent."""
    START = auto()
    CATCH_UP = auto()
    """Bring the new engine to the present policy, and let it join."""
    GIVE_UP = auto()


Reaction = tuple[Health, tuple[Treatment, ...]]


def _table() -> dict[tuple[Health, Sign], Reaction]:
    """Every state x every sign. What is not named below changes nothing: the right answer to a late message."""
    table: dict[tuple[Health, Sign], Reaction] = {(state, sign): (state, ()) for state in Health for sign in Sign}
    return table | {
        (Health.HEALTHY, Sign.TIME_UP): (Health.SUSPECT, ()),
        (Health.HEALTHY, Sign.DIED): (Health.LOST, ()),
        (Health.SUSPECT, Sign.BEAT): (Health.HEALTHY, ()),
        (Health.SUSPECT, Sign.TIME_UP): (Health.LOST, (Treatment.LOSE,)),
        (Health.SUSPECT, Sign.DIED): (Health.LOST, ()),
        (Health.LOST, Sign.TIME_UP): (Health.STARTING, (Treatment.START,)),  # GIVEN_UP if the budget is spent: `Medic`
        (Health.STARTING, Sign.STARTED): (Health.CATCHING_UP, (Treatment.CATCH_UP,)),
        (Health.STARTING, Sign.FAILED): (Health.LOST, ()),
        (Health.CATCHING_UP, Sign.FAILED): (Health.LOST, ()),
        (Health.CATCHING_UP, Sign.DIED): (Health.LOST, ()),
        (Health.CATCHING_UP, Sign.JOINED): (Health.HEALTHY, ()),
    }


TABLE = _table()


@dataclass(slots=True)
class _Patient:
    """One place."""

    state: Health = Health.HEALTHY
    since_s: float = 0.0
    heard_s: float = 0.0
    """Last heartbeat."""
    lost_s: float = 0.0
    """When the last engine there was lost."""
    joined_s: float = 0.0
    lives: int = 1
    starts: int = 0
    """Starts in a row."""
    vain_starts: int = 0
    """Those of them since the last engine that was well for a while."""


TreatmentOrder = tuple[str, Treatment]
"""A place, and what to do about it."""


class Medic:
    """All places of a run and their timers. The caller passes its clock in, and calls `due` in time."""

    def __init__(self, places: Sequence[str], *, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self._patients = {place: _Patient() for place in places}

    def state(self, place: str) -> Health:
        return self._patients[place].state

    def life(self, place: str) -> int:
        """Number of the place's present or last engine, counted from 1."""
        return self._patients[place].lives

    def healing_s(self, place: str) -> float:
        """How long the place was without an engine the last time."""
        patient = self._patients[place]
        return patient.joined_s - patient.lost_s

    def begin(self, now_s: float) -> None:
        """Every engine is well now."""
        for patient in self._patients.values():
            patient.since_s = patient.heard_s = patient.joined_s = now_s

    def on(self, place: str, sign: Sign, now_s: float) -> list[TreatmentOrder]:
        """What to do about a sign."""
        patient = self._patients[place]
        before = patient.state
        patient.state, treatments = TABLE[before, sign]
        if sign in (Sign.BEAT, Sign.JOINED):
            patient.heard_s = now_s
        if patient.state is Health.LOST and before in (Health.HEALTHY, Health.SUSPECT):
            patient.lost_s = now_s
            if now_s - patient.joined_s >= STEADY_S:
                patient.starts = 0
            if now_s - patient.joined_s >= SOUND_S:
                patient.vain_starts = 0
        if Treatment.START in treatments:
            if patient.starts == self._max_restarts:
                patient.state, treatments = Health.GIVEN_UP, (Treatment.GIVE_UP,)
            else:
                patient.starts += 1
                patient.vain_starts += 1
                patient.lives += 1
        if sign is Sign.JOINED:
            patient.joined_s = now_s
        if patient.state is not before:
            patient.since_s = now_s
        return [(place, treatment) for treatment in treatments]

    def due(self, now_s: float) -> list[TreatmentOrder]:
        """Actions for every place whose time in its state is up."""
        ready = [place for place in self._patients if (at_s := self._due_s(place)) is not None and at_s <= now_s]
        return [order for place in ready for order in self.on(place, Sign.TIME_UP, now_s)]

    def _due_s(self, place: str) -> float | None:
        patient = self._patients[place]
        match patient.state:
            case Health.HEALTHY:
                return patient.heard_s + LATE_S
            case Health.SUSPECT:
                return patient.heard_s + SILENT_S
            case Health.LOST:
                return patient.since_s + self._backoff_s(patient)
            case _:
                return None

    def _backoff_s(self, patient: _Patient) -> float:
        # Without a start left there is nothing to wait for.
        if not patient.vain_starts or patient.starts == self._max_restarts:
            return 0.0
        return min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2 ** (patient.vain_starts - 1))
