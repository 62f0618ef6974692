"""The whole config of a run, section by section."""

from __future__ import annotations

from paceline.config.base import Section
from paceline.config.cluster import ClusterConfig
from paceline.config.data import ArenaData, DataConfig
from paceline.config.evaluation import EvalConfig
from paceline.config.guard import GuardConfig
from paceline.config.learner import LearnerConfig
from paceline.config.objective import CorrectionConfig, ObjectiveConfig
from paceline.config.rollout import RolloutConfig
from paceline.config.run import PolicyConfig, RunConfig
from paceline.config.speculation import SpeculationConfig


class Config(Section):
    run: RunConfig = RunConfig()
    policy: PolicyConfig = PolicyConfig()
    data: DataConfig = ArenaData()
    rollout: RolloutConfig = RolloutConfig()
    speculation: SpeculationConfig | None = None
    """Speculative decoding; None is plain decoding."""
    learner: LearnerConfig = LearnerConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    correction: CorrectionConfig = CorrectionConfig()
    guard: GuardConfig = GuardConfig()
    eval: EvalConfig = EvalConfig()
    cluster: ClusterConfig = ClusterConfig()
