"""Process specs with defaults for tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from contexts import one_rank
from paceline.cluster.specs import EngineSettings, EngineSpec, LearnerRankSpec
from paceline.config import EngineConfig, ObjectiveConfig, SpeculationConfig


def engine_settings(engine: EngineConfig | None = None, speculation: SpeculationConfig | None = None) -> EngineSettings:
    return EngineSettings(engine=engine or EngineConfig(), speculation=speculation)


_ENGINE = EngineSpec(name="engine-0", model_path="model", settings=engine_settings(), seed=0, cores=None, device="cpu")
_LEARNER = LearnerRankSpec(
    model_path="model",
    learner=one_rank(),
    objective=ObjectiveConfig(),
    temperature=1.0,
    seed=0,
    engine=EngineConfig(),
    num_threads=None,
    cores=None,
    hand_over=None,
    device="cpu",
    transport="shared_memory",
)


def engine_spec(**changes: Any) -> EngineSpec:
    return replace(_ENGINE, **changes)


def learner_spec(**changes: Any) -> LearnerRankSpec:
    return replace(_LEARNER, **changes)
