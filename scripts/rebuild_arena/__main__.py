"""Train the policies and drafters of `paceline.assets` again: `python -m scripts.rebuild_arena --out DIR`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from paceline.assets import POLICIES
from paceline.cli import add_verbose, run_command
from paceline.context import Context


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.rebuild_arena",
        description="Train the arena's policies, round them to bfloat16, train three drafters of each kind, and write "
        "the median one\nof each, with a card that compares the three. Takes some hours on two cores and resumes in "
        "the same DIR.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="where to write them")
    add("--policy", choices=POLICIES, action="append", help="only this policy and its drafters; may be repeated")
    add("--builds", type=int, default=3, metavar="N", help="drafters of each kind (%(default)s)")
    parser.set_defaults(command=_rebuild)
    add_verbose(parser)
    return run_command(parser.parse_args())


def _rebuild(options: argparse.Namespace, context: Context) -> int:
    from scripts.rebuild_arena.rebuild import CARD_FILE, RECIPES, rebuild

    recipes = {name: recipe for name, recipe in RECIPES.items() if name in (options.policy or RECIPES)}
    rebuild(options.out, context, recipes=recipes, num_builds=options.builds)
    print((options.out / CARD_FILE).read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
