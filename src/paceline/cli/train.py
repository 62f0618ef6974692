"""`paceline train`: train a policy as a config says."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.common import Commands, register_lab
from paceline.context import Context

if TYPE_CHECKING:
    from paceline.config import Config


def add_to(commands: Commands) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "train",
        help="train a policy as a config says",
        description="Train a policy: engines sample, the learner updates, new weights are pushed to every engine.\n"
        "Settings are in the TOML file; each can be overridden as section.key=value. docs/config.md explains them all.",
        epilog="example:\n  paceline train configs/arena.toml run.steps=10 rollout.num_engines=1 run.lag=1",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", type=Path, help="TOML file, e.g. configs/arena.toml")
    parser.add_argument("overrides", nargs="*", metavar="a.b=value", help="settings that replace those of the file")
    parser.set_defaults(command=_train)


def _train(options: argparse.Namespace, context: Context) -> int:
    from paceline.config import load_config

    return run_and_report(load_config(options.config, options.overrides), context)


def run_and_report(config: Config, context: Context) -> int:
    """Train, print the headlines and write the report."""
    from paceline.report.run import write_report
    from paceline.report.summary import summary
    from paceline.sessions import train as session

    register_lab()
    directory = session.run(config, context)
    for headline in summary(directory).headlines():
        print(f"{headline.label:20} {headline.value:24} {headline.note}")
    print(f"policy: {directory / 'policy' / f'step-{config.run.steps}'}")
    print(f"report: {write_report(directory)}")
    return 0
