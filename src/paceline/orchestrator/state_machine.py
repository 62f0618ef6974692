"""Table-driven state machines with timers, one per name, without a clock of their own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import product
from typing import Any, ClassVar, Generic, TypeVar

State = TypeVar("State", bound=Enum)
Event = TypeVar("Event", bound=Enum)
Action = TypeVar("Action", bound=Enum)
Table = Mapping[tuple[State, Event], tuple[State, tuple[Action, ...]]]
"""Next state and actions for every state and event."""


def complete(
    states: Iterable[State],
    events: Iterable[Event],
    transitions: Mapping[tuple[State, Event], tuple[State, tuple[Action, ...]]],
) -> Table[State, Event, Action]:
    """Return a table of every state and event. Pairs outside `transitions` change nothing, since messages may be
    late."""
    unchanged: dict[tuple[State, Event], tuple[State, tuple[Action, ...]]] = {
        (state, event): (state, ()) for state, event in product(states, events)
    }
    return unchanged | dict(transitions)


@dataclass(slots=True, kw_only=True)
class Machine(Generic[State, Event, Action]):
    """One machine. Subclasses set `table` and add the facts that timers depend on."""

    table: ClassVar[Table[Any, Any, Any]]
    state: State
    since_s: float = 0.0

    def fire(self, event: Event) -> tuple[Action, ...]:
        """Move to the next state and return the actions to take."""
        self.state, actions = self.table[self.state, event]
        return actions


M = TypeVar("M", bound=Machine[Any, Any, Any])


class StateMachines(ABC, Generic[M, State, Event, Action]):
    """Machines by name. The caller passes in its clock, and calls `due` at `next_due_s`."""

    def __init__(self, machines: Mapping[str, M]) -> None:
        self._machines = machines

    def state(self, name: str) -> State:
        return self._machines[name].state

    def on(self, name: str, event: Event, now_s: float) -> list[tuple[str, Action]]:
        """Return the actions that follow from an event, each with the name of its machine."""
        machine = self._machines[name]
        before = machine.state
        actions = machine.fire(event)
        if machine.state is not before:
            machine.since_s = now_s
        return [(name, action) for action in actions]

    def due(self, now_s: float) -> list[tuple[str, Action]]:
        """Fire all expired timers and return the actions that follow."""
        timers = [(name, self._timer(name)) for name in self._machines]
        expired = [(name, timer[1]) for name, timer in timers if timer is not None and timer[0] <= now_s]
        return [order for name, event in expired for order in self.on(name, event, now_s)]

    def next_due_s(self) -> float | None:
        """Return the time of the next timer, or None if no timer runs."""
        timers = (self._timer(name) for name in self._machines)
        return min((timer[0] for timer in timers if timer is not None), default=None)

    @abstractmethod
    def _timer(self, name: str) -> tuple[float, Event] | None:
        """Return when the machine's timer expires and the event that it fires."""
