"""`paceline train`: train a policy as a config says."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.common import Commands
from paceline.context import Context

if TYPE_CHECKING:
    from paceline.config import Config


def add_to(commands: Commands) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "train",
        help="train a policy as a config says",
        description="Train a policy: engines sample, the learner updates, new weights are pushed to every engine.\n"
        "Settings are in the TOML file; each can be overridden as section.key=value. docs/config.md explains them all.",
        epilog="examples:\n  paceline train configs/arena.toml run.steps=10 rollout.num_engines=1 run.max_age=1\n"
        "  paceline train --resume runs/arena run.steps=20\n\n"
        "exit codes: 75 after SIGTERM and 130 after Ctrl-C, both with what to type to go on; docs/survive.md",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", nargs="?", help="TOML file, e.g. configs/arena.toml; none with --resume")
    parser.add_argument("overrides", nargs="*", metavar="a.b=value", help="settings that replace those of the file")
    parser.add_argument(
        "--resume", type=Path, metavar="RUN", help="go on with the run in this directory, e.g. runs/arena"
    )
    parser.set_defaults(command=_train)


def _train(options: argparse.Namespace, context: Context) -> int:
    from paceline.config import load_config

    if options.resume is None:
        if options.config is None:
            raise ValueError("config: is missing; must be a TOML file, or --resume RUN to go on with a run")
        return run_and_report(load_config(options.config, options.overrides), context)
    from paceline.sessions.train import resumed_config

    overrides = [*([] if options.config is None else [options.config]), *options.overrides]
    return run_and_report(resumed_config(options.resume, overrides), context, resume=options.resume)


def run_and_report(config: Config, context: Context, *, resume: Path | None = None) -> int:
    """Train, print the headlines and write the report."""
    from paceline.report.run import write_report
    from paceline.report.summary import summary
    from paceline.sessions import train as session

    directory = session.run(config, context, resume=resume)
    for headline in summary(directory).headlines():
        print(f"{headline.label:20} {headline.value:24} {headline.note}")
    print(f"policy: {directory / 'policy' / f'step-{config.run.steps}'}")
    print(f"report: {write_report(directory)}")
    return 0
