"""Records that the processes of a run are started from. Ray ships them whole."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config import EngineConfig, LearnerConfig, ObjectiveConfig, SpeculationConfig
from paceline.devices import Transport
from paceline.learner.hidden_states import HiddenStateWriterSettings
from paceline.types import DeviceKind


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    name: str
    model_path: str
    config: EngineConfig
    speculation: SpeculationConfig | None
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
