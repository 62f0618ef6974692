"""The guard: what a run does when the mismatch between engine and learner grows."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from paceline.config.base import Section


class GuardConfig(Section):
    """Limits of the guard (learner/guard.py): k3 of a step in nats per token. Once the first steps have shown what is
    normal for the run, the limits of correct, mask and raise_precision are 3, 5 and 10 times that, if it is less."""

    mode: Literal["observe", "act"] = "observe"
    """`observe` records what the guard would do; `act` does it."""
    correct: float = Field(default=0.002, gt=0)
    """Limit in nats per token above which the batch is corrected by token-tis, if the config corrects nothing.
    NeMo-RL's accepted error of 1.05, as a k3."""
    mask: float = Field(default=0.01, gt=0)
    """Limit in nats per token above which tokens outside the band are masked (token-mis)."""
    raise_precision: float = Field(default=0.03, gt=0)
    """Limit in nats per token above which, for two steps, FP8 engines are restarted in BF16."""
    skip: float = Field(default=0.1, gt=0)
    """Limit in nats per token above which the batch is skipped and the policy is pushed again. verl's alarm."""
    calibration_steps: int = Field(default=8, ge=2)
    """Calm steps from which the run learns what is normal."""
    hold_steps: int = Field(default=20, ge=1)
    """Calm steps after which engines go back to FP8; doubled whenever they had to leave it again."""
    max_pushes: int = Field(default=2, ge=1)
    """Skipped updates in a row before the run stops and saves the batch."""

    @model_validator(mode="after")
    def _rises(self) -> GuardConfig:
        if not self.correct < self.mask < self.raise_precision < self.skip:
            limits = f"{self.correct}, {self.mask}, {self.raise_precision}, {self.skip}"
            raise ValueError(
                f"guard: got {limits} for correct, mask, raise_precision, skip; must rise because each is "
                "for more than the last"
            )
        return self
