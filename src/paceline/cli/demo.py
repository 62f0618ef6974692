"""`paceline demo`: train the arena policy, write the report."""

from __future__ import annotations

import argparse
import time

from paceline.cli.common import CONFIGS, Commands, require_lab
from paceline.cli.train import run_and_report
from paceline.context import Context


def add_to(commands: Commands) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "demo",
        help="train the arena policy, write the report",
        description="From an installed package to an RL-trained policy and its report, on two CPU cores in under 15 "
        "minutes.",
    )
    parser.add_argument("overrides", nargs="*", metavar="a.b=value", help="settings that replace the demo's")
    parser.set_defaults(command=_demo)


def _demo(options: argparse.Namespace, context: Context) -> int:
    from paceline.config import load_config

    require_lab("demo")
    began_s = time.monotonic()
    code = run_and_report(load_config(CONFIGS / "demo.toml", options.overrides), context)
    print(f"demo: {(time.monotonic() - began_s) / 60:.1f} minutes in all")
    return code
