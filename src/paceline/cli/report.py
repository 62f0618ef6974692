"""`paceline report`: turn a run into one HTML page."""

from __future__ import annotations

import argparse
from pathlib import Path

from paceline.cli.common import Commands
from paceline.context import Context


def add_to(commands: Commands) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "report",
        help="turn a run into one HTML page",
        description="Read RUN/metrics.jsonl, write RUN/report.html. Works on a run still going.",
        epilog="example:\n  paceline report runs/arena",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, help="run directory, e.g. runs/arena")
    parser.add_argument(
        "--against", type=Path, metavar="OTHER_RUN", help="draw accepted length beside that of another run"
    )
    parser.set_defaults(command=_report)


def _report(options: argparse.Namespace, context: Context) -> int:
    from paceline.report.run import write_report

    print(write_report(options.run, against=options.against))
    return 0
