"""`paceline doctor`: say what works on this machine, and what to do about what does not."""

from __future__ import annotations

import argparse
from pathlib import Path

from paceline.cli.common import Commands, add_result_options, add_subject, publish, register_lab, subject
from paceline.context import Context

_POLICY = "arena:tiny"
"""Comes with the package, with its drafters."""


def add_to(commands: Commands) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "doctor",
        help="say what works on this machine",
        description="Check what a run needs, on this machine, in minutes. Each check passes, fails or is skipped.\n"
        "  machine     versions, devices, memory, shared memory, gloo and NCCL, Ray\n"
        "  policy      checkpoint, tokenizer, prompts, drafters\n"
        "  engine      starts, drafts as promised, samples from the right distribution, CUDA graphs, step times\n"
        "  weights     log-probabilities against the learner, pushes with fingerprints, sleep and wake\n"
        "  drafters    one short engine of every kind\n"
        "Exit code 1 if a check failed. docs/doctor.md explains how to read it.",
        epilog="examples:\n"
        "  paceline doctor --html doctor.html            on a small policy that comes with Paceline; attach the page\n"
        "                                                to a bug report\n"
        "  paceline doctor mine.toml                     your own config: its policy, drafter and prompts\n"
        "  paceline doctor path/to/checkpoint rollout.engine.tensor_parallel_size=2\n"
        "  paceline doctor --only shared-memory,nccl     a few checks, and what they need\n"
        "  paceline doctor --plant drafter               a test of the doctor itself: accepted-length must fail",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_subject(parser, _POLICY)
    add = parser.add_argument
    add("--only", metavar="NAME,...", default="", help="run these checks, with those that they need")
    add("--html", type=Path, metavar="FILE", help="write one page with everything that was found")
    add("--plant", metavar="TROUBLE", help="sampler, drafter or shared-memory: a test of the doctor itself")
    add_result_options(parser)
    parser.set_defaults(command=_doctor)


def _doctor(options: argparse.Namespace, context: Context) -> int:
    from paceline.config import load_config
    from paceline.doctor.check import table
    from paceline.doctor.examine import examine
    from paceline.doctor.page import write_doctor_page

    register_lab()
    file, overrides = subject("doctor", options.subject)
    if file is None and not any(word.startswith("policy.model=") for word in overrides):
        overrides = [f"policy.model={_POLICY}", *overrides]
    only = [name for name in options.only.split(",") if name]
    results, result = examine(load_config(file, overrides), context, only=only, plant=options.plant)
    print(table(results))
    if options.html is not None:
        write_doctor_page(results, result, options.html)
        print(f"written: {options.html}")
    code = publish(result, options)
    return 1 if result.figures["failed"] else code
