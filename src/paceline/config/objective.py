"""The policy loss, and its correction for the mismatch between engine and learner."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.config.base import Section


class ObjectiveConfig(Section):
    advantage: Literal["grpo", "centered"] = "grpo"
    """`grpo` divides the centred reward by the group's standard deviation; `centered` does not (Dr. GRPO)."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """The importance ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(default=0.2, gt=0)
    """The importance ratio is clipped above at 1 + clip_high. DAPO's clip-higher: above clip_low lets unlikely tokens
    grow (0.28 in the paper)."""
    loss: Literal["token", "sequence"] = "token"
    """`token`: every token of the batch weighs the same (DAPO). `sequence`: every rollout does (GRPO)."""
    drop_uniform_groups: bool = True
    """Leave out groups whose rewards are all equal: they carry no gradient (DAPO's dynamic sampling without the
    re-sampling)."""


class CorrectionConfig(Section):
    """How the loss corrects for engine and learner giving the same tokens different probabilities
    (learner/correction.py)."""

    kind: Literal["none", "token-tis", "sequence-tis", "token-mis", "sequence-mis", "geometric-mis"] = "none"
    """`none` takes the clipped ratio directly against the engine's log-probabilities. The others take it against the
    learner's own from before the update, and weigh each token by learner over engine: truncated (tis) or masked
    (mis)."""
    cap: float = Field(default=2.0, gt=1)
    """Largest importance weight of the truncated kinds, and of the tokens that geometric-mis keeps."""
    low: float | None = Field(default=None, gt=0, lt=1)
    """Lower bound of the weights that the masked kinds keep. Unset it is 0.5 for token and sequence, and 0.99 for
    geometric, which is a mean over the rollout and needs a narrower band for responses of thousands of tokens."""
    high: float | None = Field(default=None, gt=1)
    """Upper bound of the weights that the masked kinds keep. Unset it is 2 for token and sequence, and 1.01 for
    geometric."""

    @property
    def band(self) -> tuple[float, float]:
        low, high = (0.99, 1.01) if self.kind == "geometric-mis" else (0.5, 2.0)
        return self.low or low, self.high or high
