"""Share between commands: the context of a job, the subject of a command, prompts, and the output of results."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from paceline.context import Context

if TYPE_CHECKING:
    from paceline.measure import Result
    from paceline.types import Prompt

LEARNED = ("eagle3", "dflash")
"""Trained kinds of drafter."""

CONFIGS = Path(__file__).parents[1] / "configs"


def cache_root() -> Path:
    return Path(os.environ.get("PACELINE_CACHE", Path.home() / ".cache" / "paceline"))


def make_context(lines: TextIO) -> Context:
    return Context(
        report=lambda line: print(line, file=lines, flush=True),
        cache_root=cache_root(),
        terminal=lines if lines.isatty() else None,
    )


def subject(command: str, words: Sequence[str], default: str = "arena:small") -> tuple[Path | None, list[str]]:
    """Return the config file and the overrides in a command's words. Arena policies use the arena's config."""
    from paceline.sessions.workloads import arena_policy

    files = [word for word in words if word.endswith(".toml")]
    models = [word for word in words if not word.endswith(".toml") and "=" not in word]
    if len(files) + len(models) > 1:
        raise ValueError(f"{command}: got {' '.join((*files, *models))}; must be one config file or one model")
    settings = [word for word in words if "=" in word]
    if files:
        return Path(files[0]), settings
    named = [word.partition("=")[2] for word in settings if word.startswith("policy.model=")]
    model = (models or named or [default])[-1]
    file = CONFIGS / "arena.toml" if arena_policy(model) is not None else None
    return file, [f"policy.model={json.dumps(model)}", *settings]


def publish(result: Result, options: argparse.Namespace) -> int:
    """Print a result, write it for --json, and return the exit code for --check."""
    from paceline.measure import table

    print(table(result))
    if options.json is not None:
        result.write(options.json)
        print(f"written: {options.json}")
    return int(options.check and not result.all_met)


def model_and_prompts(options: argparse.Namespace, context: Context) -> tuple[Path, Iterator[Prompt], str]:
    """Return the checkpoint of `options.model`, an infinite iterator of prompts, and their description."""
    from paceline.arena.prompts import DRAFTER_DATA, drafter_prompts
    from paceline.sessions.draft import read_prompts
    from paceline.sessions.train import load_tokenizer
    from paceline.sessions.workloads import arena_policy, resolve_policy

    of_arena = arena_policy(options.model) is not None
    if options.data is None and not of_arena:
        raise ValueError("--data: got none; must be a file of prompts because only arena policies bring their own")
    model_path = resolve_policy(options.model, context)
    tokenizer = load_tokenizer(model_path)
    if options.data is None:
        return model_path, drafter_prompts(tokenizer), DRAFTER_DATA
    return model_path, read_prompts(options.data, options.prompt_key, tokenizer), options.data.name
