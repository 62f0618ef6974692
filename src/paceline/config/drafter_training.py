"""Online drafter training: its data buffer, the leases of idle engines, and when it is worth its cost."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from paceline.config.base import Section


class BufferConfig(Section):
    """Where rollouts with the policy's hidden states wait for drafter training."""

    directory: Path = Path("/dev/shm")  # noqa: S108  a folder in it is made for this user only
    """Directory in which each user has a folder, `paceline-UID`, that nobody else can enter, and each run a folder in
    that. It is shared memory by default; a folder on a disk holds more."""
    capacity_mb: float = Field(default=1024, gt=0)
    """Largest size of the whole buffer, in MiB. A token takes 4 bytes x hidden size x (taps + 1): 4 KB for
    arena:small."""
    step_mb: float = Field(default=256, gt=0)
    """Most that the learner writes in one step, in MiB."""
    step_share: float = Field(default=0.5, gt=0, le=1)
    """Share of a step's rollouts that the learner writes, if they fit into `step_mb`."""
    keep_versions: int = Field(default=8, ge=1)
    """Number of policy versions after which a rollout is dropped even if there is room, because it shows an old
    policy."""
    long_share: float = Field(default=0.25, ge=0, lt=1)
    """Share of the room kept for the longest rollouts of earlier versions, which the many short ones would crowd
    out."""
    heldout_share: float = Field(default=0.1, gt=0, lt=1)
    """Share of the prompts (and of the room) that evaluate the drafter and never train it."""


class LeaseConfig(Section):
    """When an idle engine's device is leased to drafter training, and how soon it is given back."""

    settle_s: float = Field(default=0.02, ge=0)
    """Seconds for which an engine must have been idle: between two rollouts it is idle for a moment. It is not leased
    either where its last idle times were too short for the time that its last leases took to begin and to end."""
    lease_s: float = Field(default=60, gt=0)
    """Longest lease in seconds, after which the trainer is recalled whether or not the engine has work."""


class DriftConfig(Section):
    """When the drafter is worth training, and when a trained drafter is worth publishing."""

    noise: float = Field(default=0.01, ge=0)
    """Relative change of accepted length that counts as noise."""
    horizon_steps: int = Field(default=5, ge=1)
    """RL steps over which an update has to earn its cost: by then the policy has moved on."""
    heldout_tokens: int = Field(default=2048, ge=1)
    """Tokens of the held-out slice on which old and new drafter are compared."""


class DrafterTrainingConfig(Section):
    """Training of a learned drafter while RL moves the policy away from it."""

    mode: Literal["idle", "inline", "off"] = "off"
    """`idle` trains on engines that wait for the tail of a phase; `inline` trains after the policy update and adds its
    time to the step."""
    when: Literal["worth it", "always"] = "worth it"
    """`worth it` trains when the expected gain, by acceptance measured against its baseline, exceeds the cost."""
    inline_s: float = Field(default=2.0, gt=0)
    """Seconds for which every engine's device is leased after each policy update in mode `inline`."""
    inline_slices: int | None = Field(default=None, ge=1)
    """Optimizer steps that every engine's trainer makes after each policy update in mode `inline`, instead of as many
    as `inline_s` allows: the drafter then follows from the rollouts alone, not from the speed of the machine. What
    takes longer than `lease.lease_s` is cut off."""
    round_tokens: int = Field(default=8192, ge=1)
    """Tokens that all workers together train on before the result is evaluated on the held-out slice."""
    tokens_per_step: int = Field(default=1024, ge=1)
    """Tokens of one optimizer step, which is one micro-batch if memory allows."""
    matrix_lr: float = Field(default=0.03, gt=0)
    """Learning rate of the Muon optimizer, used for matrices. Lower than in offline training, because it is never
    decayed."""
    other_lr: float = Field(default=0.003, gt=0)
    """Learning rate of AdamW, used for embeddings, output head and norms."""
    buffer: BufferConfig = BufferConfig()
    lease: LeaseConfig = LeaseConfig()
    drift: DriftConfig = DriftConfig()
