"""Parts that several subcommands share: the context of a job, the lab if it is installed, and how results are shown."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from importlib import import_module
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


def register_lab() -> None:
    """Make the arena's names known where the lab is installed; without it every other name still works."""
    try:
        lab = import_module("paceline.lab")
    except ModuleNotFoundError as error:
        if error.name != "paceline.lab":
            raise
    else:
        lab.register()


def require_lab(what: str) -> None:
    """Register the lab, or say that `what` is a part of it."""
    check_lab(what)
    register_lab()


def check_lab(what: str) -> None:
    """Refuse `what`, which is a part of the lab, where the lab is not installed."""
    try:
        import_module("paceline.lab")
    except ModuleNotFoundError as error:
        if error.name != "paceline.lab":
            raise
        raise ValueError(
            f"{what}: the lab (paceline.lab: arena and benches) is not installed; install the whole paceline package"
        ) from None


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
    from paceline.sessions import draft, workloads
    from paceline.sessions.train import load_tokenizer

    register_lab()
    named = workloads.split(options.model)
    workload = None if named is None else workloads.find(named[0], key="MODEL", got=options.model)
    if workload is None and options.data is None:
        raise ValueError("--data: got none; must be a file of prompts because only arena policies bring their own")
    model_path = workloads.resolve_policy(options.model, context)
    tokenizer = load_tokenizer(model_path)
    if workload is not None and options.data is None:
        return model_path, workload.drafter_prompts(tokenizer), workload.drafter_data
    return model_path, draft.read_prompts(options.data, options.prompt_key, tokenizer), options.data.name
