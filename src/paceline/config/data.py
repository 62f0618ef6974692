"""Where prompts and rewards come from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from paceline.config.base import Section


class ArenaData(Section):
    kind: Literal["arena"] = "arena"
    seed: int = 0
    """Which stream of training problems to use; the held-out set does not depend on it."""


class UserData(Section):
    """Prompts and a reward function of the user's own."""

    prompt_key: str = "prompt"
    """Field or column that holds the prompt: a text, or a list of messages (`{"role": ..., "content": ...}`) for the
    chat template of the policy's tokenizer."""
    reward: str
    """Reward function as `file.py:function` or `package.module:function`; called as reward(prompt, completion) or
    reward(prompt, completion, row)."""
    reward_workers: int = Field(default=4, ge=1)
    """Processes that run the reward function side by side."""
    reward_timeout_s: float = Field(default=30, gt=0)
    """Seconds for the reward of one completion; after that its process is killed and replaced."""
    reward_memory_gb: float = Field(default=4, gt=0)
    """Memory that a reward process may write to, in GiB."""
    on_reward_failure: Literal["stop", "zero", "drop"] = "stop"
    """What a reward that raises, hangs, ends its process or is no finite number does: `stop` ends the run and names the
    prompt, `zero` scores 0, `drop` leaves the prompt's group out of the update."""


class JsonlData(UserData):
    kind: Literal["jsonl"] = "jsonl"
    path: Path
    """File with one JSON object a line."""
    eval_path: Path | None = None
    """Held-out rows of the same form. Without it the last `eval.num_prompts` rows of `path` are held out."""


class HubData(UserData):
    kind: Literal["datasets"] = "datasets"
    path: str
    """First argument of `datasets.load_dataset`, or a directory made by `Dataset.save_to_disk`."""
    split: str = "train"
    """Split of the dataset."""


DataConfig = Annotated[ArenaData | JsonlData | HubData, Field(discriminator="kind")]
