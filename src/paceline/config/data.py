"""Sources of prompts and rewards."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from paceline.config.base import Section


class ArenaData(Section):
    kind: Literal["arena"] = "arena"
    seed: int = 0
    """Seed of the training problems; the held-out problems are always the same."""


class UserData(Section):
    """User-supplied prompts and reward function."""

    prompt_key: str = "prompt"
    """Field or column of the prompt: text, or a list of messages (`{"role": ..., "content": ...}`) for the policy's
    chat template."""
    reward: str
    """Reward function as `file.py:function` or `package.module:function`, called with (prompt, completion) or (prompt,
    completion, row)."""
    reward_workers: int = Field(default=4, ge=1)
    """Processes that run the reward function in parallel."""
    reward_timeout_s: float = Field(default=30, gt=0)
    """Timeout of one reward in seconds; its process is then killed and replaced."""
    reward_memory_gb: float = Field(default=4, gt=0)
    """Memory limit of a reward process in GiB."""
    on_reward_failure: Literal["stop", "zero", "drop"] = "stop"
    """Response to a reward that raises, times out, crashes or is not finite: `stop` ends the run and names the prompt,
    `zero` scores 0, `drop` leaves the prompt's group out of the update."""


class JsonlData(UserData):
    kind: Literal["jsonl"] = "jsonl"
    path: Path
    """JSON Lines file."""
    eval_path: Path | None = None
    """Held-out rows in the same format. Without it the last `eval.num_prompts` rows of `path` are held out."""


class HubData(UserData):
    kind: Literal["datasets"] = "datasets"
    path: str
    """First argument of `datasets.load_dataset`, or a directory written by `Dataset.save_to_disk`."""
    split: str = "train"
    """Split of the dataset."""


DataConfig = ArenaData | JsonlData | HubData
