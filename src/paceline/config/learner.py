"""The FSDP2 learner: optimizer, loss, importance correction and guard."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from paceline.config.base import Adjustable, Section


class LearnerConfig(Section):
    world_size: Adjustable[int] = Field(default=4, ge=1)
    """FSDP2 processes. Float32 weights, gradients and Adam moments take 16 bytes a parameter: 33 GB on each of four
    GPUs for 8 billion parameters."""
    cpus: Adjustable[int | None] = Field(default=None, ge=1)
    """CPU cores of each process on machines without GPUs; none divides all cores evenly. Engines on other cores can
    train drafters while the learner works."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Precision of forward and backward passes. Master weights, gradient reduction and optimizer state are float32."""
    learning_rate: float = Field(default=1e-6, gt=0)
    """Learning rate of AdamW after warmup."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps over which the learning rate rises linearly."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW's moments."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay of AdamW."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradient norm at which gradients are clipped."""
    minibatches: int = Field(default=1, ge=1)
    """Optimizer steps per batch."""
    microbatch_tokens: int = Field(default=4096, ge=1)
    """Padded tokens per forward pass; a longer sample gets its own pass. Activations of Qwen3-8B take 7.8 MB a token,
    so that 4,096 tokens fit beside 33 GB of state on an 80 GB GPU."""
    deadline_s: Adjustable[float] = Field(default=600, gt=0)
    """Timeout of a call to the learner, and of its collectives, in seconds."""

    @field_validator("betas")
    @classmethod
    def _decay(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                f"learner.betas: got {list(betas)}; must be from 0 to below 1 because they are decay rates"
            )
        return betas


class ObjectiveConfig(Section):
    advantage: Literal["grpo", "centered"] = "grpo"
    """`grpo` divides the centered reward by the group's standard deviation; `centered` does not (Dr. GRPO)."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """Importance ratios are clipped to at least 1 - clip_low."""
    clip_high: float = Field(default=0.2, gt=0)
    """Importance ratios are clipped to at most 1 + clip_high. DAPO's clip-higher is 0.28."""
    loss: Literal["token", "sequence"] = "token"
    """Average over tokens of the batch (DAPO) or over rollouts (GRPO)."""
    drop_uniform_groups: bool = True
    """Leave out groups with equal rewards, which carry no gradient: DAPO's dynamic sampling without resampling."""


class CorrectionConfig(Section):
    """Correction of the mismatch between engine and learner probabilities (learner/correction.py)."""

    kind: Literal["none", "recompute", "token-tis", "sequence-tis", "token-mis", "sequence-mis", "geometric-mis"] = (
        "none"
    )
    """`none` takes ratios against the engine's log-probabilities. The others take them against the learner's.
    `recompute` stops there, so that equal tokens give equal updates, bit for bit. The others also weight tokens by
    learner over engine probability, truncated (`tis`) or masked (`mis`)."""
    cap: float = Field(default=2.0, gt=1)
    """Largest weight of the truncated kinds, and of tokens kept by geometric-mis."""
    low: float | None = Field(default=None, gt=0, lt=1)
    """Lower bound of weights kept by the masked kinds. Default: 0.5, or 0.99 for geometric-mis, where the weight is a
    mean over the rollout."""
    high: float | None = Field(default=None, gt=1)
    """Upper bound of weights kept by the masked kinds. Default: 2, or 1.01 for geometric-mis."""

    @property
    def band(self) -> tuple[float, float]:
        low, high = (0.99, 1.01) if self.kind == "geometric-mis" else (0.5, 2.0)
        return self.low or low, self.high or high


class GuardConfig(Section):
    mode: Literal["observe", "act"] = "observe"
    """`observe` records the guard's decisions (learner/guard.py); `act` carries them out."""
