"""`paceline demo`: what Paceline promises, shown on this machine in five minutes."""

from __future__ import annotations

import argparse
from pathlib import Path

from paceline.cli.common import CONFIGS, Commands, add_result_options, publish
from paceline.context import Context


def add_to(commands: Commands) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "demo",
        help="see the promise kept on this machine, in five minutes",
        description="One long-tailed batch through plain vLLM, then through Paceline, on one time axis; a test that "
        "both draw\n"
        "from the same distribution; a few RL steps with speculation and a drafter trained on idle engines. It ends\n"
        "with one page: both timelines, the speed-up, the certificate, the learning curve.",
        epilog="example:\n  paceline demo --quick --html demo.html",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("overrides", nargs="*", metavar="a.b=value", help="settings of the RL steps that replace the demo's")
    add("--quick", action="store_true", help="two minutes: a smaller batch and its certificate, no RL steps")
    add("--html", type=Path, default=Path("demo.html"), metavar="FILE", help="where to write the page (%(default)s)")
    add_result_options(parser)
    parser.set_defaults(command=_demo)


def _demo(options: argparse.Namespace, context: Context) -> int:
    from paceline.demo.run import FULL, QUICK, run

    result = run(
        context=context,
        config_file=CONFIGS / "demo.toml",
        page=options.html,
        overrides=options.overrides,
        size=QUICK if options.quick else FULL,
    )
    print(f"page: {options.html}")
    return publish(result, options)
