"""Records that the processes of a run start from, and the owner of the engines' current settings."""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.config import EngineConfig, LearnerConfig, ObjectiveConfig, SpeculationConfig
from paceline.devices import Transport
from paceline.learner.hidden_states import HiddenStateWriterSettings
from paceline.types import DeviceKind


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings that change during a run, for all engines at once."""

    engine: EngineConfig
    speculation: SpeculationConfig | None


class CurrentSettings:
    """Owner of the engines' settings: starts, restarts and pushes read `now`."""

    def __init__(
        self, engine: EngineConfig, speculation: SpeculationConfig | None, *, on_history: bool = False
    ) -> None:
        """`on_history` starts engines with history instead of the configured drafter."""
        self._engine = engine
        self._speculation = speculation
        self.now = EngineSettings(engine=engine, speculation=speculation)
        if on_history:
            self.now = self.with_drafter(learned=False)

    def with_precision(self, *, raised: bool) -> EngineSettings:
        """Return the current settings in full precision or in the configured one."""
        return replace(self.now, engine=self._engine.in_full_precision if raised else self._engine)

    def with_drafter(self, *, learned: bool) -> EngineSettings:
        """Return the current settings with the learned drafter or with history."""
        assert self._speculation is not None, "the config says so"
        return replace(self.now, speculation=self._speculation if learned else self._speculation.from_history)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    name: str
    model_path: str
    settings: EngineSettings
    seed: int
    cores: tuple[int, ...] | None
    """CPU cores to bind to; None leaves placement to the system."""
    device: DeviceKind


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerRankSpec:
    model_path: str
    learner: LearnerConfig
    objective: ObjectiveConfig
    temperature: float
    seed: int
    engine: EngineConfig
    """Config of the engines that receive the weights."""
    num_threads: int | None
    cores: tuple[int, ...] | None
    """CPU cores of all ranks to bind to; None leaves placement to the system."""
    hand_over: HiddenStateWriterSettings | None
    """Hidden states to write for drafter training; None writes none."""
    device: DeviceKind
    transport: Transport
    rendezvous: tuple[str, int] | None = None
    """Host and port of the store that connects the ranks; None with one rank."""
