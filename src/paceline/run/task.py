"""A user's own task: prompts from a dataset and a reward function, as the loop wants them.

    def reward(prompt: str, completion: str) -> float: ...
    def reward(prompt: str, completion: str, row: dict) -> float: ...     # with the dataset row, e.g. for the right answer

The function is plain Python, runs in the driver and may be slow: it has a thread of its own.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import json
import random
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from paceline.config import HubData, JsonlData
from paceline.types import Group, PacelineError, Prompt

Row = Mapping[str, Any]
Reward = Callable[[str, str, Row], float]


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What the policy is trained on."""

    prompts: Iterator[Prompt]
    """Endless: a dataset is gone through again and again, in a new order each epoch."""
    heldout: Sequence[Prompt]
    reward: Reward


def make_prompt(identity: str, text: str, row: Row, tokenizer: Tokenizer) -> Prompt:
    return Prompt(id=identity, text=text, token_ids=np.asarray(tokenizer.encode(text), np.int32), row=row)


def load_task(data: JsonlData | HubData, tokenizer: Tokenizer, *, seed: int, num_heldout: int) -> Task:
    """Read a dataset and a reward function; the held-out rows are never trained on."""
    rows, heldout_rows = _load_rows(data, num_heldout)
    reward = load_reward(data.reward)
    prompts = [_prompt_of(row, index, data.prompt_key, "train", tokenizer) for index, row in enumerate(rows)]
    heldout = [_prompt_of(row, index, data.prompt_key, "heldout", tokenizer) for index, row in enumerate(heldout_rows)]
    return Task(prompts=_epochs(prompts, seed), heldout=heldout, reward=reward)


def load_reward(spec: str) -> Reward:
    """`file.py:function` or `package.module:function`."""
    where, colon, name = spec.rpartition(":")
    if not colon:
        raise ValueError(f"data.reward: got {spec!r}; must be file.py:function or package.module:function")
    try:
        module = _import_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except (ImportError, FileNotFoundError) as error:
        raise ValueError(f"data.reward: {where!r} cannot be imported: {error}") from None
    function = vars(module).get(name)
    if not callable(function):
        raise ValueError(f"data.reward: {where!r} has no function {name!r}")
    num_parameters = len(inspect.signature(function).parameters)
    if num_parameters == 2:
        without_row = cast("Callable[[str, str], float]", function)
        return lambda prompt, completion, row: without_row(prompt, completion)
    if num_parameters == 3:
        return cast("Reward", function)
    raise ValueError(
        f"data.reward: {name!r} takes {num_parameters} arguments; must be (prompt, completion) or (prompt, completion, row)"
    )


def scorer(reward: Reward, tokenizer: Tokenizer) -> Callable[[Sequence[Group]], Coroutine[Any, Any, list[list[float]]]]:
    """Rewards of whole groups from their decoded completions."""

    def score_all(groups: Sequence[Group]) -> list[list[float]]:
        return [[_score(reward, group, tokenizer.decode(r.token_ids.tolist(), True)) for r in group.rollouts] for group in groups]

    async def score(groups: Sequence[Group]) -> list[list[float]]:
        return await asyncio.to_thread(score_all, groups)

    return score


def _score(reward: Reward, group: Group, completion: str) -> float:
    try:
        value = float(reward(group.prompt.text, completion, group.prompt.row))
    except Exception as error:
        raise PacelineError(
            f"the reward function failed on prompt {group.prompt.id!r}, completion {completion[:200]!r}: {error!r}"
        ) from error
    if not np.isfinite(value):
        raise PacelineError(f"the reward of prompt {group.prompt.id!r} is {value}; it must be a finite number")
    return value


def _load_rows(data: JsonlData | HubData, num_heldout: int) -> tuple[list[Row], list[Row]]:
    if isinstance(data, HubData):
        rows = _read_datasets(data)
    else:
        rows = _read_jsonl(data.path)
        if data.eval_path is not None:
            return rows, _read_jsonl(data.eval_path)
    if len(rows) <= num_heldout:
        raise ValueError(
            f"eval.num_prompts: got {num_heldout}; must be below the dataset's {len(rows)} rows, of which the last are held out"
        )
    return rows[: len(rows) - num_heldout], rows[len(rows) - num_heldout :]


def _read_jsonl(path: Path) -> list[Row]:
    if not path.is_file():
        raise ValueError(f"data.path: got {path}; must be a file with one JSON object a line")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"data.path: {path}, line {number} is no JSON: {error}") from None
    return rows


def _read_datasets(data: HubData) -> list[Row]:
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ValueError("data.kind: got datasets, which is not installed; pip install 'paceline[datasets]'") from None
    if Path(data.path).is_dir() and (Path(data.path) / "state.json").is_file():
        return list(datasets.load_from_disk(data.path))  # type: ignore[arg-type]
    return list(datasets.load_dataset(data.path, split=data.split))  # type: ignore[arg-type]


def _prompt_of(row: Row, index: int, key: str, part: str, tokenizer: Tokenizer) -> Prompt:
    text = row.get(key)
    if not isinstance(text, str):
        raise ValueError(f"data.prompt_key: row {index} has no text under {key!r}; it has {sorted(row)}")
    return make_prompt(f"{part}/{index}", text, row, tokenizer)


def _epochs(prompts: Sequence[Prompt], seed: int) -> Iterator[Prompt]:
    rng = random.Random(seed)  # noqa: S311  an order, not a secret
    while True:
        yield from rng.sample(prompts, len(prompts))


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    spec = importlib.util.spec_from_file_location(f"paceline_task_{path.stem}", path)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
