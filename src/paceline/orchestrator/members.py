"""The registry of a run's engines. Every restart gets a new incarnation name.

    register(engine-0) ──▶ join ──▶ alive ──lose──▶ lost ──if engines are healed──▶ awaited ──give_up──▶ gone
                             ▲                                                         │
                             └─────────────── register(engine-0#2) ◀───────────────────┘

Fleet, weight sender, healing and drafter training share this registry, so all of them lose an engine at once. A
place is where an engine runs: `engine-0`, which is also the name of its first engine. The next incarnation is
`engine-0#2`. Names are unique, so late events, rollouts and receipts of one incarnation never count for another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.types import Engine

LostListener = Callable[[str, str], None]
"""Called with the engine's name and the reason of the loss."""
JoinListener = Callable[[Engine], None]


def place_of(name: str) -> str:
    return name.partition("#")[0]


def incarnation_name(place: str, number: int) -> str:
    return place if number == 1 else f"{place}#{number}"


class Members:
    """Engines of one run. Listeners are called in the order in which they were added."""

    def __init__(self, engines: Sequence[Engine] = ()) -> None:
        self._newest: dict[str, Engine] = {}
        self._alive: dict[str, Engine] = {}
        self._names: set[str] = set()
        self._awaited: set[str] = set()
        self._lost_listeners: list[LostListener] = []
        self._join_listeners: list[JoinListener] = []
        self._hopeless_listeners: list[Callable[[], None]] = []
        self.healed = False
        """Lost engines are replaced."""
        for engine in engines:
            self.join(engine)

    @property
    def engines(self) -> list[Engine]:
        """Live engines in the order in which they joined."""
        return list(self._alive.values())

    @property
    def names(self) -> list[str]:
        return list(self._alive)

    @property
    def places(self) -> list[str]:
        return list(self._newest)

    @property
    def hopeless(self) -> bool:
        """No engine is alive, and none is awaited."""
        return not self._alive and not self._awaited

    def newest(self, place: str) -> Engine:
        """Return the last registered engine of a place, which may be lost or not have joined yet."""
        return self._newest[place]

    def is_alive(self, name: str) -> bool:
        return name in self._alive

    def register(self, engine: Engine) -> None:
        """Note an engine that is about to start."""
        assert engine.name not in self._names, f"engine {engine.name} was registered before; names are unique"
        place = place_of(engine.name)
        assert place not in self._newest or self._newest[place].name not in self._alive, f"{place} is taken"
        self._names.add(engine.name)
        self._newest[place] = engine

    def join(self, engine: Engine) -> None:
        if self._newest.get(place_of(engine.name)) is not engine:
            self.register(engine)
        assert engine.name not in self._alive, f"engine {engine.name} has joined before"
        self._awaited.discard(place_of(engine.name))
        self._alive[engine.name] = engine
        for listener in self._join_listeners:
            listener(engine)

    def on_joined(self, listener: JoinListener) -> None:
        self._join_listeners.append(listener)

    def on_lost(self, listener: LostListener) -> None:
        self._lost_listeners.append(listener)

    def on_hopeless(self, listener: Callable[[], None]) -> None:
        """Call `listener` when the last place is given up and no engine is alive."""
        self._hopeless_listeners.append(listener)

    def lose(self, name: str, why: str) -> bool:
        """Stop using an engine; return False if it was lost before."""
        if name not in self._alive:
            return False
        del self._alive[name]
        if self.healed:
            self._awaited.add(place_of(name))
        for listener in self._lost_listeners:
            listener(name, why)
        return True

    def give_up(self, place: str) -> None:
        """Expect no further engine in this place."""
        self._awaited.discard(place)
        if self.hopeless:
            for listener in self._hopeless_listeners:
                listener()
