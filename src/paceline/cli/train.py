"""`paceline train`, `report`, `replay` and `demo`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.common import CONFIGS, publish
from paceline.cli.parser import HTML, JSON, OVERRIDES, QUICK, RESULT, Command, option
from paceline.context import Context

if TYPE_CHECKING:
    from paceline.config import Config


def _train(options: argparse.Namespace, context: Context) -> int:
    from paceline.config import load_config

    if options.resume is None:
        words = [word for word in (options.config, *options.overrides) if word is not None]
        file = words.pop(0) if words and "=" not in words[0] else None
        return run_and_report(load_config(file, words), context)
    from paceline.sessions.train import resumed_config

    overrides = [*([] if options.config is None else [options.config]), *options.overrides]
    return run_and_report(resumed_config(options.resume, overrides), context, resume=options.resume)


def run_and_report(config: Config, context: Context, *, resume: Path | None = None) -> int:
    """Train, print the headlines and write the report."""
    from paceline.report.run import write_report
    from paceline.report.summary import summary
    from paceline.sessions import train as session

    directory = session.run(config, context, resume=resume)
    for headline in summary(directory).headlines():
        print(f"{headline.label:20} {headline.value:24} {headline.note}")
    print(f"policy: {directory / 'policy' / f'step-{config.run.steps}'}")
    print(f"report: {write_report(directory)}")
    return 0


def _report(options: argparse.Namespace, context: Context) -> int:
    from paceline.report.equality import compare_tokens
    from paceline.report.run import write_report

    print(write_report(options.run, against=options.against))
    if options.against is not None:
        print(compare_tokens(options.run, options.against).words())
    return 0


def _replay(options: argparse.Namespace, context: Context) -> int:
    from paceline.config import load_config
    from paceline.sessions.replay import replay, rows
    from paceline.types import RolloutId

    try:
        rollout_id = RolloutId.parse(options.rollout)
    except ValueError:
        raise ValueError(f"rollout: got {options.rollout!r}; must be as in metrics.jsonl: 17.0/train:3") from None
    config = load_config(options.run / "config.json", options.overrides)
    result = replay(options.run, rollout_id, options.overrides, config, context)
    print("\n".join(rows(result)))
    if options.json is not None:
        result.write(options.json)
    return int(not result.all_met)


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


TRAIN = Command(
    words="train",
    help="train a policy",
    details="""
        Train a policy: engines sample rollouts, the learner updates the policy, and every engine receives the new
        weights. The TOML file has the settings; override each as section.key=value. See docs/config.md.

        Exit code 75 after SIGTERM, 130 after Ctrl-C; both print the resume command. See docs/survive.md.
        """,
    examples="""
        paceline train configs/arena.toml run.steps=10 rollout.num_engines=1 run.max_age=1
        paceline train --resume runs/arena run.steps=20
        """,
    options=(
        option("config", nargs="?", help="TOML file, such as configs/arena.toml; none with --resume"),
        OVERRIDES,
        option("--resume", type=Path, metavar="RUN", help="continue the run in this directory, such as runs/arena"),
    ),
    run=_train,
)
REPORT = Command(
    words="report",
    help="write a run's report as one HTML page",
    details="Read RUN/metrics.jsonl and write RUN/report.html. Works while the run is going.",
    examples="paceline report runs/arena",
    options=(
        option("run", type=Path, metavar="RUN", help="run directory, such as runs/arena"),
        option(
            "--against",
            type=Path,
            metavar="OTHER_RUN",
            help="compare tokens, rewards and accepted length with another run",
        ),
    ),
    run=_report,
)
REPLAY = Command(
    words="replay",
    help="generate one rollout of a run again",
    details="""
        Generate one rollout of a run again, on one engine without and one with the run's speculation, and compare it
        with the recorded one token by token. Needs the policy that it came from: run.save_every=1 keeps all. Exit code
        1 if a token differs. A run without speculation can be replayed with speculation.drafter.kind=ngram and so on.
        """,
    examples="""
        paceline replay runs/arena --rollout 17.0/train:3
        paceline replay runs/arena speculation.drafter.kind=ngram --rollout 17.0/train:3
        """,
    options=(
        option("run", type=Path, metavar="RUN", help="run directory, such as runs/arena"),
        option("--rollout", required=True, metavar="ID", help="group and index, as in metrics.jsonl: 17.0/train:3"),
        OVERRIDES.but(help="settings of speculation"),
        JSON,
    ),
    run=_replay,
)
DEMO = Command(
    words="demo",
    help="run a five-minute demo on this machine",
    details="""
        Generate one long-tailed batch with plain vLLM, then the same tokens with Paceline; run a few RL steps with
        speculation and a drafter trained on idle engines. Writes one page with both timelines, the speedup, the number
        of equal rollouts and the learning curve.
        """,
    examples="paceline demo --quick --html demo.html",
    options=(
        OVERRIDES.but(help="settings of the RL steps"),
        QUICK.but(help="two minutes: a smaller batch, no RL steps"),
        HTML.but(default=Path("demo.html")),
        *RESULT,
    ),
    run=_demo,
)
