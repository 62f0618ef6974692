"""The config of a run."""

from __future__ import annotations

from pydantic import Field, model_validator

from paceline.config.base import Section
from paceline.config.data import DataConfig
from paceline.config.learner import CorrectionConfig, GuardConfig, LearnerConfig, ObjectiveConfig
from paceline.config.rollout import RolloutConfig
from paceline.config.run import ClusterConfig, EvalConfig, PolicyConfig, RunConfig
from paceline.config.speculation import SpeculationConfig


class Config(Section):
    run: RunConfig = RunConfig()
    policy: PolicyConfig
    data: DataConfig | None = Field(default=None, discriminator="kind")
    """Prompts and rewards, required by `paceline train`. Other commands use the arena's prompts if None."""
    rollout: RolloutConfig = RolloutConfig()
    speculation: SpeculationConfig | None = None
    """Speculative decoding; None disables it."""
    learner: LearnerConfig = LearnerConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    correction: CorrectionConfig = CorrectionConfig()
    guard: GuardConfig = GuardConfig()
    eval: EvalConfig = EvalConfig()
    cluster: ClusterConfig = ClusterConfig()

    @model_validator(mode="after")
    def _restartable(self) -> Config:
        if self.speculation is not None and self.speculation.has_random_drafter and self.run.max_age:
            raise ValueError(
                f"speculation.drafter.init: got 'random' with run.max_age {self.run.max_age}; must be 'checkpoint' "
                "because engines restart between batches, and asynchronous training never stops between batches"
            )
        return self
