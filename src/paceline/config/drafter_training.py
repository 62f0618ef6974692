"""Online drafter training and its data buffer."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from paceline.config.base import Section


class BufferConfig(Section):
    """Buffer of rollouts with the policy's hidden states, from which drafters are trained."""

    directory: Path = Path("/dev/shm")  # noqa: S108  each user's folder in it is private
    """Parent directory. Each user gets a private folder `paceline-UID` in it, and each run a folder in that. The
    default is shared memory; a directory on a disk holds more."""
    capacity_mb: float = Field(default=8192, gt=0)
    """Size limit of the buffer in MiB; one step writes at most a quarter of it. A token takes 4 bytes x hidden size x
    (taps + 1), which is 64 KiB for Qwen3-8B: the default holds 131,072 tokens."""
    keep_versions: int = Field(default=8, ge=1)
    """Policy versions after which a rollout is dropped."""
    heldout_share: float = Field(default=0.1, gt=0, lt=1)
    """Share of prompts, and of the capacity, reserved for evaluating drafters and never trained on."""


class DrafterTrainingConfig(Section):
    """Training of a learned drafter while RL changes the policy."""

    mode: Literal["idle", "inline", "off"] = "off"
    """`idle` trains on engines that have finished early in a rollout phase. `inline` trains after the policy update
    and adds its time to the step."""
    when: Literal["auto", "always"] = "auto"
    """`auto` trains while the expected gain exceeds the cost, and publishes a drafter that is at least 1 % better.
    `always` trains at every opportunity and publishes any improvement."""
    inline_s: float = Field(default=2.0, gt=0)
    """Seconds of training after each policy update in mode `inline`."""
    inline_slices: int | None = Field(default=None, ge=1)
    """Optimizer steps of each engine's trainer after each policy update in mode `inline`, instead of `inline_s`. The
    result then does not depend on the machine's speed."""
    round_tokens: int = Field(default=8192, ge=1)
    """Tokens trained on, over all engines, before a drafter is evaluated on a quarter as many held-out tokens."""
    tokens_per_step: int = Field(default=1024, ge=1)
    """Tokens per optimizer step."""
    learning_rate: float = Field(default=0.03, gt=0)
    """Learning rate of Muon for matrices, without decay. AdamW uses a tenth of it for embeddings, output head and
    norms."""
    buffer: BufferConfig = BufferConfig()

    @property
    def heldout_tokens(self) -> int:
        """Held-out tokens on which two drafters are compared."""
        return max(1, self.round_tokens // 4)
