"""`paceline explain`: what the variable PACELINE would fill in for given engine arguments, without an engine."""

from __future__ import annotations

import argparse
import json

from paceline.cli.common import Commands
from paceline.context import Context


def add_to(commands: Commands) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "explain",
        help="say what PACELINE=... would fill in for given engine arguments",
        description="Say what the variable PACELINE would fill in of a host's engine arguments, and why. Checks the "
        "drafter as\nan engine would, and starts none. Exit code 1 if something is wrong and nothing would be filled "
        "in.",
        epilog="examples:\n"
        "  paceline explain auto model=path/to/policy\n"
        "  paceline explain speculation.toml model=Qwen/Qwen3-8B max_model_len=8192 load_format=dummy",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("setting", metavar="VALUE", help="auto (the policy's MTP heads), or a TOML file with a section [speculation]")
    add("given", nargs="*", metavar="NAME=VALUE", help="engine arguments that the host sets, as vLLM's EngineArgs has")
    parser.set_defaults(command=_explain)


def _explain(options: argparse.Namespace, context: Context) -> int:
    from paceline.config import parse_overrides
    from paceline.devices import on_gpu
    from paceline.rollout.hosts import fill

    filling = fill(parse_overrides(options.given), options.setting, on_gpu=on_gpu())
    print(filling.line(options.setting))
    for name, value in filling.arguments.items():
        print(f"  {name} = {json.dumps(value)}")
    return int(filling.refused)
