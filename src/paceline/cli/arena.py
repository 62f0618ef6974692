"""`paceline arena build`: train and cache a policy of the built-in small workload."""

from __future__ import annotations

import argparse

from paceline.cli.common import Commands, require_lab
from paceline.context import Context


def add_to(commands: Commands) -> None:
    arena = commands.add_parser("arena", help="the built-in small workload").add_subparsers(
        required=True, metavar="ACTION"
    )
    build: argparse.ArgumentParser = arena.add_parser(
        "build",
        help="train and cache an arena policy",
        description="Train an arena policy from scratch and cache it. Built once: it is found again while its recipe "
        "is the same.\n"
        "tiny: for tests, about a minute. small: 3-4 M parameters, several minutes. large: small, grown to 350 M "
        "parameters.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    build.add_argument("name", choices=("tiny", "small", "large"), nargs="?", default="small")
    build.set_defaults(command=_build)


def _build(options: argparse.Namespace, context: Context) -> int:
    require_lab("arena build")
    from paceline.lab.arena.policy import build

    print(build(options.name, context))
    return 0
