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


class JsonlData(Section):
    kind: Literal["jsonl"] = "jsonl"
    path: Path
    """File with one JSON object a line."""
    prompt_key: str = "prompt"
    """Field that holds the prompt: a text, or a list of messages (`{"role": ..., "content": ...}`) for the chat
    template of the policy's tokenizer."""
    reward: str
    """Reward function as `file.py:function` or `package.module:function`; called as reward(prompt, completion) or
    reward(prompt, completion, row)."""
    eval_path: Path | None = None
    """Held-out rows of the same form. Without it the last `eval.num_prompts` rows of `path` are held out."""


class HubData(Section):
    kind: Literal["datasets"] = "datasets"
    path: str
    """First argument of `datasets.load_dataset`, or a directory made by `Dataset.save_to_disk`."""
    split: str = "train"
    """Split of the dataset."""
    prompt_key: str = "prompt"
    """Column that holds the prompt, as in the jsonl kind."""
    reward: str
    """Reward function, as in the jsonl kind."""


DataConfig = Annotated[ArenaData | JsonlData | HubData, Field(discriminator="kind")]
