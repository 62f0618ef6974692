"""`paceline sidecar`: train the drafter of a running vLLM server, from rollouts that its host writes to disk."""

from __future__ import annotations

import argparse
from pathlib import Path

from paceline.cli.common import Commands
from paceline.context import CancelledError, Context

_TRAINING = "speculation.training."


def add_to(commands: Commands) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "sidecar",
        help="train the drafter of a running vLLM server while another trainer trains its policy",
        description="Train the drafter of a vLLM server on this machine, for a trainer that asks the server for "
        "rollouts.\n"
        "Reads the trainer's rollouts as they are written, computes hidden states with the newest checkpoint that it\n"
        "has saved, trains the drafter, and pushes every drafter that guesses held-out rollouts better. What is\n"
        "sampled stays the policy's: an old checkpoint costs acceptance and nothing else.\n"
        "\n"
        'A rollout is a line of a *.jsonl file in DIR: {"prompt_ids": [...], "response_ids": [...]}, or prompt and\n'
        "response as text (verl's input and output too). Lines may be appended, files moved in.\n"
        "\n"
        "The server needs Paceline's scheduler and a drafter, which PACELINE=speculation.toml brings, and\n"
        "--middleware paceline.rollout.endpoint.CallsEndpoint, which asks for a token that only processes of the same\n"
        "user can read. A sidecar runs until Ctrl-C or SIGTERM.",
        epilog="examples:\n"
        "  PACELINE=/data/speculation.toml vllm serve MODEL --host 127.0.0.1 \\\n"
        "      --middleware paceline.rollout.endpoint.CallsEndpoint\n"
        "  paceline sidecar --server http://127.0.0.1:8000 --rollouts run/rollouts --policy MODEL --policy run\n"
        "  paceline sidecar --server http://127.0.0.1:8000 --rollouts run/rollouts --policy run --share 1 \\\n"
        "      --out drafter --metrics sidecar.jsonl speculation.training.buffer.capacity_mb=4096",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("overrides", nargs="*", metavar=f"{_TRAINING}KEY=value", help="settings of drafter training (docs/config.md)")
    add("--server", required=True, metavar="URL", help="address of the server, on this machine")
    add("--rollouts", type=Path, required=True, metavar="DIR", help="where the trainer writes rollouts")
    policy = "where the trainer saves the policy: a checkpoint, or a directory with checkpoints in it, the newest of "
    add(
        "--policy",
        type=Path,
        required=True,
        action="append",
        metavar="DIR",
        help=f"{policy}which is used; may be given again, for the checkpoint that training starts from",
    )
    add("--drafter", type=Path, metavar="DIR", help="drafter to start from (the one that the server has loaded)")
    add("--out", type=Path, metavar="DIR", help="keep a copy of the last drafter that was pushed; must not exist")
    add("--metrics", type=Path, metavar="FILE", help="append a JSON line with the metrics of every round to FILE")
    add("--share", type=float, default=0.5, metavar="S", help="share of the time spent on training (%(default)s)")
    add("--period", type=float, default=10.0, metavar="S", help="seconds from round to round (%(default)s)")
    add("--rounds", type=int, metavar="N", help="end after so many rounds")
    parser.set_defaults(command=_sidecar)


def _sidecar(options: argparse.Namespace, context: Context) -> int:
    from paceline.config import load_config
    from paceline.sessions.sidecar import SidecarSettings, run_sidecar

    for word in options.overrides:
        if not word.startswith(_TRAINING):
            raise ValueError(f"{word}: must begin with {_TRAINING} because a sidecar trains a drafter and nothing else")
    # All rollouts count: a tenth of their prompts is all that drafters are compared on.
    always = ["speculation.drafter.kind=ngram", f"{_TRAINING}buffer.step_share=1.0"]
    config = load_config(None, [*always, *options.overrides])
    assert config.speculation is not None
    settings = SidecarSettings(
        server=options.server,
        rollouts=options.rollouts,
        policies=tuple(options.policy),
        drafter=options.drafter,
        out=options.out,
        metrics=options.metrics,
        share=options.share,
        period_s=options.period,
        rounds=options.rounds,
        training=config.speculation.training,
    )
    try:
        run_sidecar(settings, context)
    except (KeyboardInterrupt, CancelledError):
        context.report("the sidecar has ended; the server goes on with the drafter that it has")
    return 0
