"""`paceline export drafter`: hand a drafter to others as a checkpoint for stock vLLM, with a card."""

from __future__ import annotations

import argparse
from pathlib import Path

from paceline.cli.common import Commands
from paceline.context import Context


def add_to(commands: Commands) -> None:
    export = commands.add_parser("export", help="hand a drafter to others: a checkpoint for stock vLLM, with a card")
    drafter: argparse.ArgumentParser = export.add_subparsers(required=True, metavar="WHAT").add_parser(
        "drafter",
        help="a speculators checkpoint that stock vLLM serves, with a model card",
        description="Check a drafter and write it to OUT, whole or not at all. Paceline is not needed to serve it:\n"
        "OUT/README.md states its kind, its policy, acceptance by position, accepted length by draft length, what it "
        "was trained\n"
        "on, and the `vllm serve` command. What training did not record, the card calls not recorded.",
        epilog="examples:\n"
        "  paceline export drafter drafter published             what `paceline draft train MODEL --out drafter` "
        "wrote\n"
        "  paceline export drafter runs/arena published          the drafter that a run has trained "
        "(runs/arena/drafter)\n"
        "  paceline export drafter drafter published --policy Qwen/Qwen3-8B",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = drafter.add_argument
    add("source", type=Path, metavar="SOURCE", help="drafter's checkpoint directory, or a run with drafter/ in it")
    add("out", type=Path, metavar="OUT", help="directory to write; must not exist")
    policy = "where others find the policy, for card and config (without it: as training named it)"
    add("--policy", metavar="NAME", help=policy)
    drafter.set_defaults(command=_export)


def _export(options: argparse.Namespace, context: Context) -> int:
    from paceline.drafters.export import CARD_FILE, export_drafter

    export_drafter(options.source, options.out, policy=options.policy)
    print(f"drafter: {options.out}")
    print(f"card: {options.out / CARD_FILE}")
    return 0
