"""Who is alive: the engines of a run, each life of one under a name of its own. Pure logic.

    join(engine-0) ──▶ alive ──lose(engine-0, why)──▶ lost ──if engines are healed──▶ awaited ──give_up(engine-0)
                         ▲                                                               │
                         └───────────────────────── join(engine-0#2) ────────────────────┘

Listeners are told of every loss and of every join once. Fleet, weight sender and drafter training ask this one object,
so an engine that one of them finds dead is dead for all of them. A place is where an engine runs: `engine-0`, which is
also the name of the first engine there. The next one is `engine-0#2`: no name is used twice, so news, rollouts and
receipts of an earlier life are never taken for those of a later one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.types import Engine

LostListener = Callable[[str, str], None]
"""Is called with the engine's name and why it was lost."""
JoinListener = Callable[[Engine], None]


def place_of(name: str) -> str:
    """The place of an engine."""
    return name.partition("#")[0]


def life_name(place: str, life: int) -> str:
    """Name of the engine that is the nth in its place; the first has the place's."""
    return place if life == 1 else f"{place}#{life}"


class Members:
    """The engines of one run. Listeners are called in the order in which they were added."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._alive: dict[str, Engine] = {}
        self._names: set[str] = set()
        self._awaited: set[str] = set()
        self._lost_listeners: list[LostListener] = []
        self._join_listeners: list[JoinListener] = []
        self._hopeless_listeners: list[Callable[[], None]] = []
        self.healed = False
        """Somebody starts another engine where one was lost."""
        for engine in engines:
            self.join(engine)

    @property
    def engines(self) -> list[Engine]:
        """Engines that are alive, in the order in which they joined."""
        return list(self._alive.values())

    @property
    def names(self) -> list[str]:
        return list(self._alive)

    @property
    def hopeless(self) -> bool:
        """No engine is alive, and none will be."""
        return not self._alive and not self._awaited

    def is_alive(self, name: str) -> bool:
        return name in self._alive

    def join(self, engine: Engine) -> None:
        """Add an engine, under a name that no engine had before."""
        assert engine.name not in self._names, f"engine {engine.name} has joined before; names are unique"
        assert place_of(engine.name) not in map(place_of, self._alive), f"the place of {engine.name} is taken"
        self._names.add(engine.name)
        self._awaited.discard(place_of(engine.name))
        self._alive[engine.name] = engine
        for listener in self._join_listeners:
            listener(engine)

    def on_joined(self, listener: JoinListener) -> None:
        """Call `listener` for every engine that joins from now on."""
        self._join_listeners.append(listener)

    def on_lost(self, listener: LostListener) -> None:
        """Call `listener` for every engine that is lost from now on."""
        self._lost_listeners.append(listener)

    def on_hopeless(self, listener: Callable[[], None]) -> None:
        """Call `listener` when the last place is given up and no engine is alive."""
        self._hopeless_listeners.append(listener)

    def lose(self, name: str, why: str) -> bool:
        """Stop using an engine; False if it was lost already."""
        if name not in self._alive:
            return False
        del self._alive[name]
        if self.healed:
            self._awaited.add(place_of(name))
        for listener in self._lost_listeners:
            listener(name, why)
        return True

    def give_up(self, place: str) -> None:
        """Nobody will start another engine in this place."""
        self._awaited.discard(place)
        if self.hopeless:
            for listener in self._hopeless_listeners:
                listener()
