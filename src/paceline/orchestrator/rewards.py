"""A user's reward function: found by name, called in a thread of its own, and checked to return a finite number.

    def reward(prompt: str, completion: str) -> float: ...
    def reward(prompt: str, completion: str, row: dict) -> float: ...   # with the dataset row, for the answer

The function is plain Python, runs in the driver and may be slow.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from paceline.types import Group, PacelineError, Tokenizer

Row = Mapping[str, Any]
Reward = Callable[[str, str, Row], float]


def load_reward(spec: str) -> Reward:
    """Import `file.py:function` or `package.module:function`; one with two parameters is not given the row."""
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
        f"data.reward: {name!r} takes {num_parameters} arguments; must be (prompt, completion) or "
        "(prompt, completion, row)"
    )


def scorer(reward: Reward, tokenizer: Tokenizer) -> Callable[[Sequence[Group]], Coroutine[Any, Any, list[list[float]]]]:
    """Rewards of whole groups from their decoded completions."""

    def score_all(groups: Sequence[Group]) -> list[list[float]]:
        return [
            [_score(reward, group, tokenizer.decode(r.token_ids.tolist(), True)) for r in group.rollouts]
            for group in groups
        ]

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


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    spec = importlib.util.spec_from_file_location(f"paceline_task_{path.stem}", path)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
