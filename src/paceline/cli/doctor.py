"""`paceline doctor`: check this machine for a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from paceline.cli.common import Commands, add_result_options, add_subject, publish, subject
from paceline.context import Context

_POLICY = "arena:tiny"
"""Comes with the package, with its drafters."""


def add_to(commands: Commands) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "doctor",
        help="check this machine for a run",
        description="Check in minutes whether this machine can run a config. Each check passes, fails or is skipped.\n"
        "  machine     packages, devices, compiler, Ray\n"
        "  config      checkpoint, prompts, drafter\n"
        "  memory      GPU, host, /dev/shm, disk\n"
        "  engine      starts, generates, samples from the right distribution, accepts as many drafts as expected\n"
        "  weights     log-probabilities against the learner, pushes through shared memory and by broadcast\n"
        "Exit code 1 if a check failed. See docs/doctor.md.",
        epilog="examples:\n"
        "  paceline doctor --html doctor.html            on a small policy that comes with Paceline; attach the page\n"
        "                                                to a bug report\n"
        "  paceline doctor mine.toml                     your own config: its policy, drafter and prompts\n"
        "  paceline doctor path/to/checkpoint rollout.engine.tensor_parallel_size=2\n"
        "  paceline doctor --only shared-memory,sampler  a few checks",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_subject(parser, _POLICY)
    add = parser.add_argument
    add("--only", metavar="NAME,...", default="", help="run only these checks")
    add("--html", type=Path, metavar="FILE", help="write a page with all findings")
    add_result_options(parser)
    parser.set_defaults(command=_doctor)


def _doctor(options: argparse.Namespace, context: Context) -> int:
    from paceline.config import load_config
    from paceline.doctor.examine import examine
    from paceline.doctor.finding import table
    from paceline.doctor.page import write_doctor_page

    file, overrides = subject("doctor", options.subject)
    if file is None and not any(word.startswith("policy.model=") for word in overrides):
        overrides = [f"policy.model={_POLICY}", *overrides]
    only = [name for name in options.only.split(",") if name]
    findings, result = examine(load_config(file, overrides), context, only=only)
    print(table(findings))
    if options.html is not None:
        write_doctor_page(findings, result, options.html)
        print(f"written: {options.html}")
    code = publish(result, options)
    return 1 if result.figures["failed"] else code
