"""Load a user's task: training and held-out prompts from a JSON Lines file or a Hugging Face dataset."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TypeGuard, cast

import numpy as np

from paceline.config import HubData, JsonlData
from paceline.files import read_jsonl
from paceline.orchestrator.reward_pool import UserReward, find_reward
from paceline.orchestrator.rewards import Reward, Row
from paceline.types import Prompt, Tokenizer

_OFFLINE = (
    "HF_HUB_OFFLINE is set, so only the cache is used: unset it, fill the cache with "
    "`hf download --repo-type dataset NAME`, or give a directory that `Dataset.save_to_disk` wrote"
)
_NOT_FOUND = (
    "Check the name, the split and the network; without a network give a directory that `Dataset.save_to_disk` wrote"
)

Located = tuple[str, Row]
"""Location of a row, for error messages, and the row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    prompts: Iterator[Prompt]
    """Infinite iterator over the dataset, shuffled every epoch."""
    heldout: Sequence[Prompt]
    reward: Reward | UserReward


def make_prompt(identity: str, content: object, row: Row, tokenizer: Tokenizer) -> Prompt:
    """Make a prompt of a text, or of messages ({"role", "content"}) with the tokenizer's chat template."""
    is_chat = _is_chat(content)
    text = _chat(content, tokenizer) if is_chat else content
    if not isinstance(text, str):
        raise ValueError(f"got {content!r:.60}; must be a text or a list of messages")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"got {text[:60]!r}, which contains half of a surrogate pair; must be valid Unicode") from None
    token_ids = tokenizer.encode(text, add_special_tokens=not is_chat)  # chat templates include them
    return Prompt(id=identity, text=text, token_ids=np.asarray(token_ids, np.int32), row=row)


def _is_chat(content: object) -> TypeGuard[list[dict[str, str]]]:
    return isinstance(content, list) and content != []


def _chat(messages: list[dict[str, str]], tokenizer: Tokenizer) -> str:
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # a template is a program and may raise anything
        raise ValueError(
            f"got a list of messages that the tokenizer cannot turn into text: {error}. The chat template is "
            "chat_template.jinja in the directory of policy.model; messages "
            'must be [{"role": ..., "content": ...}, ...] in an order that the template allows'
        ) from error


def load_task(
    data: JsonlData | HubData,
    tokenizer: Tokenizer,
    *,
    seed: int,
    num_heldout: int,
    max_prompt_tokens: int | None = None,
) -> Task:
    """Read a dataset and a reward function; refuse prompts of more than `max_prompt_tokens`."""
    rows, heldout_rows = _load_rows(data, num_heldout)
    reward = find_reward(data)
    if reward.takes_row:
        _check_rows([*rows, *heldout_rows])
    prompts = [prompt_of(row, data.prompt_key, f"train/{index}", tokenizer) for index, row in enumerate(rows)]
    heldout = [prompt_of(row, data.prompt_key, f"heldout/{index}", tokenizer) for index, row in enumerate(heldout_rows)]
    if max_prompt_tokens is not None:
        _check_lengths([*prompts, *heldout], [*rows, *heldout_rows], max_prompt_tokens)
    return Task(prompts=_epochs(prompts, seed), heldout=heldout, reward=reward)


def read_rows(path: Path, *, key: str) -> list[Located]:
    """Return the rows of a JSON Lines file; errors begin with `key`, the setting that names the file."""
    if not path.is_file():
        raise ValueError(f"{key}: got {path}; must be a file with one JSON object a line")
    rows: list[Located] = []
    try:
        for number, row in read_jsonl(path):
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: got {str(row)[:60]!r}; must be a JSON object")
            rows.append((f"{path}, line {number}", cast("Row", row)))
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None
    if not rows:
        raise ValueError(f"{key}: {path} has no rows; must have at least one JSON object a line")
    return rows


def _load_rows(data: JsonlData | HubData, num_heldout: int) -> tuple[list[Located], list[Located]]:
    if isinstance(data, HubData):
        rows = _read_datasets(data)
    else:
        rows = read_rows(data.path, key="data.path")
        if data.eval_path is not None:
            return rows, read_rows(data.eval_path, key="data.eval_path")
    if len(rows) <= num_heldout:
        raise ValueError(
            f"eval.num_prompts: got {num_heldout}; must be below the dataset's {len(rows)} rows because the last ones "
            "are held out"
        )
    return rows[: len(rows) - num_heldout], rows[len(rows) - num_heldout :]


def _read_datasets(data: HubData) -> list[Located]:
    try:
        datasets = import_module("datasets")  # untyped
    except ImportError:
        raise ValueError("data.kind: got datasets, which is not installed; pip install 'paceline[datasets]'") from None
    what = f"{data.path!r} with split {data.split!r}"
    try:
        if (Path(data.path) / "state.json").is_file():
            rows = list(datasets.load_from_disk(data.path))
        else:
            rows = list(datasets.load_dataset(data.path, split=data.split))
    except Exception as error:
        advice = _OFFLINE if datasets.config.HF_HUB_OFFLINE else _NOT_FOUND
        raise ValueError(f"data.path: {what} cannot be loaded: {error}. {advice}") from error
    if not rows:
        raise ValueError(f"data.path: {what} has no rows; must have at least one")
    return [(f"{what}, row {index}", cast("Row", row)) for index, row in enumerate(rows)]


def prompt_of(
    located: Located, key: str, identity: str, tokenizer: Tokenizer, *, setting: str = "data.prompt_key"
) -> Prompt:
    """Return the prompt under `key` in a row; errors name `setting`."""
    where, row = located
    if key not in row:
        raise ValueError(f"{setting}: {where}: no prompt under {key!r}; it has {sorted(row)}")
    try:
        prompt = make_prompt(identity, row[key], row, tokenizer)
    except ValueError as error:
        raise ValueError(f"{setting}: {where}: {error}") from error
    if not len(prompt.token_ids):
        raise ValueError(f"{setting}: {where}: the prompt has no tokens; must have at least one")
    return prompt


def _check_rows(rows: Sequence[Located]) -> None:
    """Refuse rows that cannot be sent to the reward process."""
    for where, row in rows:
        try:
            json.dumps(row)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"data.path: {where}: {error}; must be JSON because the reward function takes the row in another "
                "process. Remove or convert such columns (Dataset.remove_columns, Dataset.map), or let the function "
                "take (prompt, completion) only"
            ) from None


def _check_lengths(prompts: Sequence[Prompt], rows: Sequence[Located], most: int) -> None:
    lengths = [len(prompt.token_ids) for prompt in prompts]
    for (where, _), length in zip(rows, lengths, strict=True):
        if length > most:
            raise ValueError(
                f"data.path: {where}: the prompt has {length} tokens; must have at most {most} "
                f"(rollout.engine.max_model_len - rollout.max_tokens). The longest has {max(lengths)}: remove such "
                "rows or raise max_model_len"
            )


def _epochs(prompts: Sequence[Prompt], seed: int) -> Iterator[Prompt]:
    rng = random.Random(seed)  # noqa: S311  an order, not a secret
    while True:
        yield from rng.sample(prompts, len(prompts))
