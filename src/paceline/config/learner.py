"""The FSDP2 learner and the calibration of FP8 KV scales."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from paceline.config.base import Adjustable, Section


class CalibrationConfig(Section):
    """KV scales after every update, from a share of the step's own batch. Unused unless `rollout.engine.kv_cache` is
    fp8."""

    share: float = Field(default=0.05, gt=0, le=1)
    """Share of the batch's tokens, in whole samples, that the calibration's forward pass reads."""
    max_tokens: int = Field(default=4096, ge=1)
    """Largest number of tokens that the calibration reads, however large the batch."""
    percentile: float = Field(default=100.0, gt=0, le=100)
    """Percentile over tokens of each token's largest key or value. Below 100 the largest ones saturate."""
    margin: float = Field(default=1.25, ge=1)
    """Factor above that percentile, as room for tokens that were not read. E4M3 loses nothing by it until small values
    underflow."""


class LearnerConfig(Section):
    world_size: Adjustable[int] = Field(default=1, ge=1)
    """Number of FSDP2 processes."""
    cpus: Adjustable[int | None] = Field(default=None, ge=1)
    """Cores of each process where there is no GPU; None divides all cores among the processes. Engines on other cores
    may be leased to drafter training while the learner works."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the forward and backward pass. Master weights and optimizer state are float32 in either case."""
    learning_rate: float = Field(default=1e-6, gt=0)
    """Learning rate of AdamW after warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps over which the learning rate rises linearly."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW's first and second moment, each from 0 to below 1."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay of AdamW."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradient norm above which gradients are clipped."""
    minibatches: int = Field(default=1, ge=1)
    """Optimizer steps per batch."""
    microbatch_tokens: int = Field(default=8192, ge=1)
    """Padded tokens in one forward pass; bounds memory. A longer sample gets a pass of its own."""
    deadline_s: Adjustable[float] = Field(default=600, gt=0)
    """Seconds within which each call of the learner must answer, and for which a rank waits for the others."""
    calibration: CalibrationConfig = CalibrationConfig()

    @field_validator("betas")
    @classmethod
    def _decay(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                f"learner.betas: got {list(betas)}; must be from 0 to below 1 because they are decay rates"
            )
        return betas
