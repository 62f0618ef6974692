"""`paceline arena rebuild`: make the policies and drafters that come with the package anew."""

from __future__ import annotations

import argparse
from pathlib import Path

from paceline.assets import POLICIES
from paceline.cli.common import Commands, require_lab
from paceline.context import Context


def add_to(commands: Commands) -> None:
    arena = commands.add_parser("arena", help="the built-in small workload").add_subparsers(
        required=True, metavar="ACTION"
    )
    rebuild: argparse.ArgumentParser = arena.add_parser(
        "rebuild",
        help="make the policies and drafters that come with the package anew",
        description="Train the arena's policies, round them to bfloat16, train three drafters of each kind on them, "
        "and write\n"
        "the middle one of each, with a card that says how far the three lie apart. Some hours on two cores; started\n"
        "again with the same DIR, it goes on where it was stopped. Nobody needs it to use Paceline.",
        epilog="example:\n  paceline arena rebuild --out assets --policy tiny",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = rebuild.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="where to write them")
    add(
        "--policy",
        choices=POLICIES,
        action="append",
        help="only this policy and its drafters; may be repeated",
    )
    add("--builds", type=int, default=3, metavar="N", help="drafters of each kind (%(default)s)")
    rebuild.set_defaults(command=_rebuild)


def _rebuild(options: argparse.Namespace, context: Context) -> int:
    require_lab("arena rebuild")
    from paceline.lab.arena.rebuild import CARD_FILE, RECIPES, rebuild

    recipes = {name: recipe for name, recipe in RECIPES.items() if name in (options.policy or RECIPES)}
    rebuild(options.out, context, recipes=recipes, num_builds=options.builds)
    print((options.out / CARD_FILE).read_text(encoding="utf-8"))
    return 0
