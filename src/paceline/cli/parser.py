"""Build command-line parsers from declarative commands. Every option that commands share is declared here, once."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import cleandoc
from pathlib import Path
from typing import Any

from paceline.context import Context


@dataclass(frozen=True, slots=True)
class Option:
    """Arguments of argparse's `add_argument`."""

    names: tuple[str, ...]
    settings: Mapping[str, Any]

    def but(self, **settings: Any) -> Option:
        """Return the option with other settings."""
        return replace(self, settings={**self.settings, **settings})

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        shown = self.settings.get("default") not in (None, "", [], argparse.SUPPRESS)
        note = " (default: %(default)s)" if shown else ""
        parser.add_argument(*self.names, **{**self.settings, "help": self.settings["help"] + note})


def option(*names: str, **settings: Any) -> Option:
    return Option(names, settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    words: str
    """Name, preceded by its group: `draft train`."""
    help: str
    details: str = ""
    """Description in the command's own --help; by default `help`."""
    examples: str
    options: Sequence[Option] = ()
    run: Callable[[argparse.Namespace, Context], int]


_RAW = argparse.RawDescriptionHelpFormatter
GROUPS = {
    "draft": "train a drafter for a policy",
    "export": "export a drafter for stock vLLM",
    "certify": "verify losslessness on your engine",
}


def build(commands: Sequence[Command], *, prog: str, description: str, epilog: str) -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog=prog, description=cleandoc(description), epilog=cleandoc(epilog), formatter_class=_RAW
    )
    top.set_defaults(verbose=False)
    VERBOSE.add_to(top)
    groups = {"": top.add_subparsers(required=True, metavar="COMMAND")}
    for command in commands:
        group, _, name = command.words.rpartition(" ")
        if group not in groups:
            parser = groups[""].add_parser(group, help=GROUPS[group])
            VERBOSE.add_to(parser)
            groups[group] = parser.add_subparsers(required=True, metavar="ACTION")
        fill(groups[group].add_parser(name, help=command.help, formatter_class=_RAW), command)
    return top


def fill(parser: argparse.ArgumentParser, command: Command) -> None:
    examples = cleandoc(command.examples).splitlines()
    parser.description = cleandoc(command.details) or f"{command.help[:1].upper()}{command.help[1:]}."
    parser.epilog = "\n  ".join([f"example{'s' if len(examples) > 1 else ''}:", *examples])
    for each in (*command.options, VERBOSE):
        each.add_to(parser)
    parser.set_defaults(command=command.run)


# Options that commands share.

VERBOSE = option("--verbose", action="store_true", default=argparse.SUPPRESS, help="show the output of libraries")
MODEL = option("model", metavar="MODEL", help="arena:tiny, arena:small, arena:large, or a checkpoint directory")
OVERRIDES = option("overrides", nargs="*", metavar="a.b=value", help="settings, such as rollout.num_engines=2")
SUBJECT = option(
    "subject", nargs="*", metavar="CONFIG|MODEL|a.b=value", help="TOML file or checkpoint, and settings (arena:small)"
)
DRAFTER = option("--drafter", metavar="DRAFTER", help="directory of a drafter, ngram, or arena for an arena policy")
POLICY = option("--policy", metavar="NAME", help="name of the policy")
DATA = option("--data", type=Path, metavar="FILE", help="JSONL file of prompts; arena policies have their own")
PROMPT_KEY = option("--prompt-key", default="prompt", metavar="KEY", help="field of FILE with the prompt")
TOKENS = option("--tokens", type=int, metavar="N", help="number of tokens")
OUT = option("--out", type=Path, required=True, metavar="DIR", help="directory to write; must not exist")
QUICK = option("--quick", action="store_true", help="use a smaller sample")
HTML = option("--html", type=Path, metavar="FILE", help="write one HTML page")
JSON = option("--json", type=Path, metavar="FILE", help="write figures, spread, goals and environment")
CHECK = option("--check", action="store_true", help="exit 1 if a goal is missed")
PROMPTS = (DATA, PROMPT_KEY)
RESULT = (JSON, CHECK)
