"""Every knob of a run: frozen, unknown keys refused, read from a TOML file plus `a.b=value` overrides.

    config = load_config("configs/arena.toml", ["run.steps=10", "objective.clip_high=0.28"])

The resolved config is written beside every run and every measurement, so that a figure can be made again.
"""

from paceline.config.base import Section
from paceline.config.cluster import ClusterConfig
from paceline.config.data import ArenaData, DataConfig, HubData, JsonlData, UserData
from paceline.config.drafter_training import BufferConfig, DrafterTrainingConfig, DriftConfig, LeaseConfig
from paceline.config.evaluation import EvalConfig
from paceline.config.guard import GuardConfig
from paceline.config.learner import CalibrationConfig, LearnerConfig
from paceline.config.load import adjustable_keys, fields_of, load_config, parse_overrides, sections_in
from paceline.config.objective import CorrectionConfig, ObjectiveConfig
from paceline.config.rollout import EngineConfig, RolloutConfig
from paceline.config.root import Config
from paceline.config.run import PolicyConfig, RunConfig
from paceline.config.speculation import (
    BanditSelector,
    DrafterConfig,
    EagleDrafter,
    FixedSelector,
    HistoryDrafter,
    LearnedDrafter,
    MeasuredSelector,
    NgramDrafter,
    ParallelDrafter,
    SelectorConfig,
    SimpleSelector,
    SpeculationConfig,
    TableSelector,
    VllmDrafter,
)

__all__ = [
    "ArenaData",
    "BanditSelector",
    "BufferConfig",
    "CalibrationConfig",
    "ClusterConfig",
    "Config",
    "CorrectionConfig",
    "DataConfig",
    "DrafterConfig",
    "DrafterTrainingConfig",
    "DriftConfig",
    "EagleDrafter",
    "EngineConfig",
    "EvalConfig",
    "FixedSelector",
    "GuardConfig",
    "HistoryDrafter",
    "HubData",
    "JsonlData",
    "LearnedDrafter",
    "LearnerConfig",
    "LeaseConfig",
    "MeasuredSelector",
    "NgramDrafter",
    "ObjectiveConfig",
    "ParallelDrafter",
    "PolicyConfig",
    "RolloutConfig",
    "RunConfig",
    "Section",
    "SelectorConfig",
    "SimpleSelector",
    "SpeculationConfig",
    "TableSelector",
    "UserData",
    "VllmDrafter",
    "adjustable_keys",
    "fields_of",
    "load_config",
    "parse_overrides",
    "sections_in",
]
