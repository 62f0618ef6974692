"""`paceline draft train`: train a drafter for a policy."""

from __future__ import annotations

import argparse
from pathlib import Path

from paceline.cli.common import LEARNED, Commands, add_prompt_options, model_and_prompts
from paceline.context import Context


def add_to(commands: Commands) -> None:
    draft = commands.add_parser("draft", help="train a drafter for a policy")
    train: argparse.ArgumentParser = draft.add_subparsers(required=True, metavar="ACTION").add_parser(
        "train",
        help="warm start: an EAGLE-3 or DFlash drafter from the policy's own rollouts",
        description="Train the small model that proposes tokens for MODEL to verify. An engine samples rollouts of "
        "MODEL, the\n"
        "learner hands out its hidden states on them, and a decoder layer or two learn to guess several tokens ahead.\n"
        "The result is a checkpoint that stock vLLM serves. At the end a table shows, on rollouts that were kept "
        "aside,\n"
        "  overlap           share of drafts that will be accepted at temperature 1, at each draft position\n"
        "  accepted length   tokens per verification that this makes at each draft length; what speculation can gain "
        "at most",
        epilog="examples:\n"
        "  paceline draft train arena:small --out drafter\n"
        "  paceline draft train MODEL --data prompts.jsonl --out drafter --kind dflash\n"
        "  paceline train config.toml speculation.drafter.kind=dflash speculation.drafter.path=drafter",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = train.add_argument
    add("model", metavar="MODEL", help="arena:tiny, arena:small, arena:large, or a checkpoint directory")
    kinds = "eagle3: a pass for each token; dflash: all tokens in one pass (%(default)s)"
    add("--kind", choices=LEARNED, default="eagle3", help=kinds)
    add("--out", type=Path, required=True, metavar="DIR", help="where to write the drafter; must not exist")
    add(
        "--tokens",
        type=int,
        default=1_300_000,
        metavar="N",
        help="most tokens to train on (%(default)s), fewer once it stops gaining",
    )
    add_prompt_options(train)
    train.set_defaults(command=_train)


def _train(options: argparse.Namespace, context: Context) -> int:
    from paceline.sessions import draft

    model_path, prompts, data = model_and_prompts(options, context)
    recipe = draft.WarmStart(
        train_tokens=options.tokens // 2, most_tokens=options.tokens, rollout_tokens=options.tokens // 3
    )
    evaluation = draft.train_drafter(
        options.kind, model_path, prompts, options.out, recipe, policy=options.model, data=data, context=context
    )
    print("draft position / length  " + "".join(f"{k:8}" for k in range(1, len(evaluation.overlap) + 1)))
    print("overlap                  " + "".join(f"{value:8.3f}" for value in evaluation.overlap))
    print("accepted length          " + "".join(f"{value:8.2f}" for value in evaluation.accepted_length))
    print(options.out)
    return 0
