"""`paceline draft train`, `export drafter`, `sidecar` and `explain`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from paceline.cli.common import LEARNED, model_and_prompts
from paceline.cli.parser import DRAFTER, MODEL, OUT, OVERRIDES, POLICY, PROMPTS, TOKENS, Command, option
from paceline.context import CancelledError, Context

_TRAINING = "speculation.training."


def _draft(options: argparse.Namespace, context: Context) -> int:
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


def _export(options: argparse.Namespace, context: Context) -> int:
    from paceline.drafters.export import CARD_FILE, export_drafter

    export_drafter(options.source, options.out, policy=options.policy)
    print(f"drafter: {options.out}")
    print(f"card: {options.out / CARD_FILE}")
    return 0


def _explain(options: argparse.Namespace, context: Context) -> int:
    from paceline.config import parse_overrides
    from paceline.devices import on_gpu
    from paceline.rollout.hosts import fill

    filling = fill(parse_overrides(options.given), options.setting, on_gpu=on_gpu())
    print(filling.line(options.setting))
    for name, value in filling.arguments.items():
        print(f"  {name} = {json.dumps(value)}")
    return int(filling.refused)


def _sidecar(options: argparse.Namespace, context: Context) -> int:
    from paceline.config import load_config
    from paceline.sessions.sidecar import SidecarSettings, run_sidecar

    for word in options.overrides:
        if not word.startswith(_TRAINING):
            raise ValueError(f"{word}: must begin with {_TRAINING} because a sidecar only trains a drafter")
    always = [f"policy.model={json.dumps(str(options.policy[0]))}", "speculation.drafter.kind=ngram"]
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
        context.report("the sidecar stopped; the server keeps its current drafter")
    return 0


DRAFT = Command(
    words="draft train",
    help="train an EAGLE-3 or DFlash drafter on the policy's rollouts",
    details="""
        Train the small model that drafts tokens for MODEL to verify. An engine samples rollouts of MODEL, the learner
        computes hidden states on them, and one or two decoder layers learn to predict several tokens ahead. The result
        is a checkpoint that stock vLLM serves. At the end a table shows, on held-out rollouts:
          overlap           share of drafts accepted at temperature 1, at each draft position
          accepted length   tokens per verification at each draft length: the limit of speculation's gain
        """,
    examples="""
        paceline draft train arena:small --out drafter
        paceline draft train MODEL --data prompts.jsonl --out drafter --kind dflash
        paceline train config.toml speculation.drafter.kind=dflash speculation.drafter.path=drafter
        """,
    options=(
        MODEL,
        option(
            "--kind", choices=LEARNED, default="eagle3", help="eagle3: a pass per token; dflash: all tokens in one pass"
        ),
        OUT,
        TOKENS.but(default=1_300_000, help="most tokens to train on; fewer if the gain stops"),
        *PROMPTS,
    ),
    run=_draft,
)
EXPORT = Command(
    words="export drafter",
    help="export a drafter as a speculators checkpoint with a model card",
    details="""
        Check a drafter and write it to OUT atomically. Stock vLLM serves it without Paceline. OUT/README.md has its
        kind and policy, acceptance by position, accepted length by draft length, training data and the `vllm serve`
        command; values that training did not record are marked.
        """,
    examples="""
        paceline export drafter drafter published             from `paceline draft train MODEL --out drafter`
        paceline export drafter runs/arena published          the drafter of a run (runs/arena/drafter)
        paceline export drafter drafter published --policy Qwen/Qwen3-8B
        """,
    options=(
        option("source", type=Path, metavar="SOURCE", help="checkpoint directory of a drafter, or a run with drafter/"),
        option("out", type=Path, metavar="OUT", help="directory to write; must not exist"),
        POLICY.but(help="public name of the policy, for card and config (default: its name in training)"),
    ),
    run=_export,
)
SIDECAR = Command(
    words="sidecar",
    help="train the drafter of a running vLLM server",
    details="""
        Train the drafter of a vLLM server on this machine, for a trainer that samples from the server. Reads the
        trainer's rollouts as they are written, computes hidden states with its newest checkpoint, trains the drafter,
        and pushes each drafter that predicts held-out rollouts better. Sampling follows the policy's distribution: an
        old checkpoint affects acceptance only.

        A rollout is a line of a *.jsonl file in DIR: {"prompt_ids": [...], "response_ids": [...]}, or prompt and
        response as text (verl's input and output too). Append lines or move files in.

        The server needs PACELINE=speculation.toml for scheduler and drafter, and VLLM_SERVER_DEV_MODE=1 or
        --middleware paceline.rollout.endpoint.CallsEndpoint, which requires a token that only processes of the same
        user can read. A sidecar runs until Ctrl-C or SIGTERM.
        """,
    examples=r"""
        PACELINE=/data/speculation.toml VLLM_SERVER_DEV_MODE=1 vllm serve MODEL
        paceline sidecar --server http://127.0.0.1:8000 --rollouts run/rollouts --policy MODEL --policy run
        paceline sidecar --server http://127.0.0.1:8000 --rollouts run/rollouts --policy run --share 1 \
            --out drafter --metrics sidecar.jsonl speculation.training.buffer.capacity_mb=4096
        """,
    options=(
        OVERRIDES.but(metavar=f"{_TRAINING}KEY=value", help="settings of drafter training (docs/config.md)"),
        option("--server", required=True, metavar="URL", help="address of the server, on this machine"),
        option("--rollouts", type=Path, required=True, metavar="DIR", help="directory of the trainer's rollouts"),
        POLICY.but(
            type=Path,
            required=True,
            action="append",
            metavar="DIR",
            help="the trainer's checkpoint, or a directory of them: the newest is used; repeat for the initial one",
        ),
        DRAFTER.but(type=Path, metavar="DIR", help="initial drafter (default: the server's)"),
        OUT.but(required=False, help="keep a copy of the last pushed drafter; must not exist"),
        option("--metrics", type=Path, metavar="FILE", help="append a JSON line with the metrics of every round"),
        option("--share", type=float, default=0.5, metavar="S", help="share of time for training"),
        option("--period", type=float, default=10.0, metavar="S", help="seconds between rounds"),
        option("--rounds", type=int, metavar="N", help="stop after N rounds"),
    ),
    run=_sidecar,
)
EXPLAIN = Command(
    words="explain",
    help="show the engine arguments that PACELINE=... fills in",
    details="""
        Show the engine arguments that the variable PACELINE fills in for a host, and why. Checks the drafter like an
        engine, and starts none. Exit code 1 if an error prevents filling in.
        """,
    examples="""
        paceline explain auto model=path/to/policy
        paceline explain speculation.toml model=Qwen/Qwen3-8B max_model_len=8192 load_format=dummy
        """,
    options=(
        option(
            "setting",
            metavar="VALUE",
            help="auto (the policy's MTP heads), or a TOML file with a section [speculation]",
        ),
        option("given", nargs="*", metavar="NAME=VALUE", help="the host's engine arguments, named as in EngineArgs"),
    ),
    run=_explain,
)
