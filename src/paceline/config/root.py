"""The whole config of a run, section by section."""

from __future__ import annotations

from pydantic import model_validator

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

    @model_validator(mode="after")
    def _restartable(self) -> Config:
        if self.speculation is not None and self.speculation.has_new_drafter and self.run.max_age:
            raise ValueError(
                f"speculation.drafter.path: got 'new' with run.max_age {self.run.max_age}; must be a checkpoint "
                "because engines are started again between batches, and in asynchronous training there is no between"
            )
        return self
