"""Who is alive: the engines of a run by name, each under an incarnation. Pure logic.

    join(engine) ──▶ alive under incarnation n ──lose(name, why)──▶ lost: every listener is told once
         ▲                                                            │
         └──────────────── the same name, incarnation n + 1 ──────────┘

Fleet, weight sender and drafter training ask this one object, so an engine that one of them finds dead is dead for
all of them. News about an earlier incarnation is ignored: a call that was under way when its engine was lost may fail
long after the engine's successor has joined.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.types import Engine

Listener = Callable[[str, str], None]
"""Is called with the engine's name and why it was lost."""


class Members:
    """The engines of one run. Listeners are called in the order in which they were added."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._alive: dict[str, Engine] = {}
        self._incarnations: dict[str, int] = {}
        self._listeners: list[Listener] = []
        for engine in engines:
            self.join(engine)

    @property
    def engines(self) -> list[Engine]:
        """Engines that are alive, in the order in which they joined."""
        return list(self._alive.values())

    @property
    def names(self) -> list[str]:
        return list(self._alive)

    def incarnation(self, name: str) -> int:
        """Number of the engine's present or last life, counted from 0."""
        return self._incarnations[name]

    def is_alive(self, name: str, incarnation: int | None = None) -> bool:
        """Whether the engine lives, and under this incarnation if one is given."""
        return name in self._alive and incarnation in (None, self._incarnations[name])

    def join(self, engine: Engine) -> int:
        """Add an engine, or one that was lost and is back; returns its incarnation."""
        assert engine.name not in self._alive, f"engine {engine.name} is alive; names are unique"
        self._alive[engine.name] = engine
        self._incarnations[engine.name] = self._incarnations.get(engine.name, -1) + 1
        return self._incarnations[engine.name]

    def on_lost(self, listener: Listener) -> None:
        """Call `listener` for every engine that is lost from now on."""
        self._listeners.append(listener)

    def lose(self, name: str, why: str, *, incarnation: int | None = None) -> bool:
        """Stop using an engine; False if it was lost already, or if the news is about an earlier incarnation."""
        if not self.is_alive(name, incarnation):
            return False
        del self._alive[name]
        for listener in self._listeners:
            listener(name, why)
        return True
