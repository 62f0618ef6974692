"""Parts that several subcommands share: the context of a job, options, and the output of results."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from paceline.context import Context

if TYPE_CHECKING:
    from paceline.measure import Result
    from paceline.types import Prompt

Commands = Any
"""What `ArgumentParser.add_subparsers` returns; argparse has no public name for it."""

LEARNED = ("eagle3", "dflash")
"""Kinds of drafter that are trained."""

CONFIGS = Path(__file__).parents[1] / "configs"
"""Configs that come with the package."""


def cache_root() -> Path:
    return Path(os.environ.get("PACELINE_CACHE", Path.home() / ".cache" / "paceline"))


def make_context(lines: TextIO) -> Context:
    """Return the context of a command that reports to `lines`."""
    return Context(
        report=lambda line: print(line, file=lines, flush=True),
        cache_root=cache_root(),
        terminal=lines if lines.isatty() else None,
    )


def add_subject(parser: argparse.ArgumentParser, default: str = "arena:small") -> None:
    """Take a config or a policy, and settings; `subject` reads them."""
    parser.add_argument(
        "subject",
        nargs="*",
        metavar="CONFIG|MODEL|a.b=value",
        help=f"TOML file or checkpoint, and settings ({default})",
    )


def subject(command: str, words: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Return the config file and the overrides that a command's words stand for."""
    files = [word for word in words if word.endswith(".toml")]
    models = [word for word in words if not word.endswith(".toml") and "=" not in word]
    if len(files) + len(models) > 1:
        raise ValueError(f"{command}: got {' '.join((*files, *models))}; must be one config file or one model")
    overrides = [f"policy.model={model}" for model in models] + [word for word in words if "=" in word]
    return (Path(files[0]) if files else None), overrides


def add_result_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write figures, spread, goals and environment to FILE"
    )
    parser.add_argument("--check", action="store_true", help="exit 1 if a goal is missed")


def publish(result: Result, options: argparse.Namespace) -> int:
    """Print a result and write it where --json says; returns the exit code that --check asks for."""
    from paceline.measure import table

    print(table(result))
    if options.json is not None:
        result.write(options.json)
        print(f"written: {options.json}")
    return int(options.check and not result.all_met)


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    """Take a file of prompts; `model_and_prompts` reads it."""
    add = parser.add_argument
    add("--data", type=Path, metavar="FILE", help="JSONL file with prompts; not needed for arena policies")
    add("--prompt-key", default="prompt", metavar="KEY", help="field of FILE that holds the prompt (%(default)s)")


def model_and_prompts(options: argparse.Namespace, context: Context) -> tuple[Path, Iterator[Prompt], str]:
    """Return the checkpoint of `options.model`, prompts for it again and again, and what they are."""
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
