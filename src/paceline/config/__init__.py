"""All settings of a run, from a TOML file and `a.b=value` overrides.

    config = load_config("configs/arena.toml", ["run.steps=10", "objective.clip_high=0.28"])

Configs are frozen and refuse unknown keys. Every run and measurement saves its resolved config.
"""

from paceline.config.base import Section
from paceline.config.data import ArenaData, DataConfig, HubData, JsonlData, UserData
from paceline.config.drafter_training import BufferConfig, DrafterTrainingConfig
from paceline.config.learner import CorrectionConfig, GuardConfig, LearnerConfig, ObjectiveConfig
from paceline.config.load import adjustable_keys, fields_of, load_config, parse_overrides, sections_in
from paceline.config.rollout import EngineConfig, RolloutConfig
from paceline.config.root import Config
from paceline.config.run import ClusterConfig, EvalConfig, PolicyConfig, RunConfig
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
    "ClusterConfig",
    "Config",
    "CorrectionConfig",
    "DataConfig",
    "DrafterConfig",
    "DrafterTrainingConfig",
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
