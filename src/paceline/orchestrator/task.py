"""A user's task: prompts from a JSON Lines file or a Hugging Face dataset, split into training and held-out ones."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np

from paceline.config import HubData, JsonlData
from paceline.files import read_jsonl
from paceline.orchestrator.rewards import Reward, Row, load_reward
from paceline.types import Prompt, Tokenizer

_OFFLINE = (
    "HF_HUB_OFFLINE is set, so only what is in the cache can be used: unset it, fill the cache with "
    "`hf download --repo-type dataset NAME`, or give a directory that `Dataset.save_to_disk` wrote"
)
_NOT_FOUND = (
    "Check the name, the split and the network; without a network give a directory that `Dataset.save_to_disk` wrote"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What the policy is trained on."""

    prompts: Iterator[Prompt]
    """Endless: a dataset is gone through again and again, in a new order each epoch."""
    heldout: Sequence[Prompt]
    reward: Reward


def make_prompt(identity: str, content: object, row: Row, tokenizer: Tokenizer) -> Prompt:
    """Make a prompt of a text as it is, or of messages ({"role", "content"}) through the tokenizer's chat template."""
    if isinstance(content, str):
        text, token_ids = content, tokenizer.encode(content)
    elif isinstance(content, list) and content:
        text = _chat(identity, content, tokenizer)
        token_ids = tokenizer.encode(text, add_special_tokens=False)  # the template has written them
    else:
        raise ValueError(f"data.prompt_key: {identity} has {content!r:.60}; must be a text or a list of messages")
    return Prompt(id=identity, text=text, token_ids=np.asarray(token_ids, np.int32), row=row)


def _chat(identity: str, messages: list[dict[str, str]], tokenizer: Tokenizer) -> str:
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # a template is a program of its own, which may raise anything
        raise ValueError(
            f"data.prompt_key: {identity} is a list of messages that the tokenizer cannot make a text of: {error}. A "
            "tokenizer takes its chat template from chat_template.jinja in the directory of policy.model; messages "
            'must be [{"role": ..., "content": ...}, ...] in an order that the template allows'
        ) from error


def load_task(data: JsonlData | HubData, tokenizer: Tokenizer, *, seed: int, num_heldout: int) -> Task:
    """Read a dataset and a reward function; the held-out rows are never trained on."""
    rows, heldout_rows = _load_rows(data, num_heldout)
    reward = load_reward(data.reward)
    prompts = [_prompt_of(row, index, data.prompt_key, "train", tokenizer) for index, row in enumerate(rows)]
    heldout = [_prompt_of(row, index, data.prompt_key, "heldout", tokenizer) for index, row in enumerate(heldout_rows)]
    return Task(prompts=_epochs(prompts, seed), heldout=heldout, reward=reward)


def _load_rows(data: JsonlData | HubData, num_heldout: int) -> tuple[list[Row], list[Row]]:
    if isinstance(data, HubData):
        rows = _read_datasets(data)
    else:
        rows = _read_jsonl(data.path)
        if data.eval_path is not None:
            return rows, _read_jsonl(data.eval_path)
    if len(rows) <= num_heldout:
        raise ValueError(
            f"eval.num_prompts: got {num_heldout}; must be below the dataset's {len(rows)} rows, the last of which are "
            "held out"
        )
    return rows[: len(rows) - num_heldout], rows[len(rows) - num_heldout :]


def _read_jsonl(path: Path) -> list[Row]:
    if not path.is_file():
        raise ValueError(f"data.path: got {path}; must be a file with one JSON object a line")
    try:
        return [row for _, row in read_jsonl(path)]
    except ValueError as error:
        raise ValueError(f"data.path: {error}") from None


def _read_datasets(data: HubData) -> list[Row]:
    try:
        from datasets import config, load_dataset, load_from_disk  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ValueError("data.kind: got datasets, which is not installed; pip install 'paceline[datasets]'") from None
    if (Path(data.path) / "state.json").is_file():
        return cast("list[Row]", list(load_from_disk(data.path)))
    try:
        return cast("list[Row]", list(load_dataset(data.path, split=data.split)))
    except Exception as error:
        advice = _OFFLINE if config.HF_HUB_OFFLINE else _NOT_FOUND
        what = f"{data.path!r} with split {data.split!r}"
        raise ValueError(f"data.path: {what} cannot be loaded: {error}. {advice}") from error


def _prompt_of(row: Row, index: int, key: str, part: str, tokenizer: Tokenizer) -> Prompt:
    if key not in row:
        raise ValueError(f"data.prompt_key: row {index} has no text under {key!r}; it has {sorted(row)}")
    return make_prompt(f"{part}/{index}", row[key], row, tokenizer)


def _epochs(prompts: Sequence[Prompt], seed: int) -> Iterator[Prompt]:
    rng = random.Random(seed)  # noqa: S311  an order, not a secret
    while True:
        yield from rng.sample(prompts, len(prompts))
