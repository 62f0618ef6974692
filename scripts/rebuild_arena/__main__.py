"""Train the policies and drafters of `paceline.assets` again: `python -m scripts.rebuild_arena --out DIR`."""

from __future__ import annotations

import argparse
import sys

from paceline.assets import POLICIES
from paceline.cli import run_command
from paceline.cli.parser import OUT, POLICY, Command, fill, option
from paceline.context import Context


def _rebuild(options: argparse.Namespace, context: Context) -> int:
    from scripts.rebuild_arena.rebuild import CARD_FILE, RECIPES, rebuild

    recipes = {name: recipe for name, recipe in RECIPES.items() if name in (options.policy or RECIPES)}
    rebuild(options.out, context, recipes=recipes, num_builds=options.builds)
    print((options.out / CARD_FILE).read_text(encoding="utf-8"))
    return 0


REBUILD = Command(
    words="rebuild_arena",
    help="train the arena's policies and drafters",
    details="""
        Train the arena's policies, round them to bfloat16, train three drafters of each kind, and write the median one
        of each, with a card that compares the three. Takes some hours on two cores and resumes in the same DIR.
        """,
    examples="python -m scripts.rebuild_arena --out assets --policy tiny",
    options=(
        OUT.but(help="directory to write"),
        POLICY.but(choices=POLICIES, action="append", help="only this policy and its drafters; may be repeated"),
        option("--builds", type=int, default=3, metavar="N", help="drafters of each kind"),
    ),
    run=_rebuild,
)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.rebuild_arena", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.set_defaults(verbose=False)
    fill(parser, REBUILD)
    return run_command(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
