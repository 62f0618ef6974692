"""Run a bench: `python -m benchmarks NAME --json FILE [--check] [a.b=value ...]`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli import run_command
from paceline.cli.certify import LOSSLESS
from paceline.cli.common import CONFIGS, publish
from paceline.cli.parser import HTML, OVERRIDES, RESULT, Command, build, option
from paceline.context import Context

if TYPE_CHECKING:
    from paceline.measure import Result

Arguments = Callable[[argparse.Namespace], dict[str, Any]]


def _nothing(options: argparse.Namespace) -> dict[str, Any]:
    return {}


def _runs(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of a bench that trains the arena's config."""
    return {"config_file": CONFIGS / "arena.toml", "overrides": options.overrides}


def _environment(options: argparse.Namespace) -> dict[str, Any]:
    """Return the argument of a bench that starts engines with caches of its own."""
    return {"environ": os.environ}


def _runs_elsewhere(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of a bench that trains in processes with caches of their own."""
    return {**_runs(options), **_environment(options)}


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the argument of a bench whose subject can be set."""
    return {"overrides": options.overrides}


def _settings_elsewhere(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of a bench whose subject can be set and has caches of its own."""
    return {**_settings(options), **_environment(options)}


def _costs(options: argparse.Namespace) -> dict[str, Any]:
    return {"costs_file": next(iter(options.costs), None), "overrides": options.overrides}


def _plan(options: argparse.Namespace) -> dict[str, Any]:
    return {"cost_files": options.costs} if options.arena else {"refit": options.fit}


@dataclass(frozen=True, slots=True)
class BenchEntry:
    """One bench: its line in --help, which options its `run` takes beside the context, and who draws its page."""

    about: str
    arguments: Arguments = _nothing
    page: str | None = None
    """Module and function that write --html."""
    on_arena: str | None = None
    """Module that --arena stands for."""


BENCHES = {
    "correction": BenchEntry(
        "held-out accuracy with FP8 rollouts, corrected and not, against BF16; three seeds (about 65 minutes)", _runs
    ),
    "costs": BenchEntry(
        "step time and acceptance by batch and draft length on arena:large: a prior for the selector (about 7 minutes)",
        _costs,
    ),
    "control": BenchEntry("cost of the control plane per rollout, with 16 to 1,024 simulated engines (about 1 minute)"),
    "faults": BenchEntry(
        "engines, learner, drafter training and driver killed or stopped: what is lost, how long until it is found "
        "(about 65 minutes)",
        _runs_elsewhere,
    ),
    "guard": BenchEntry(
        "planted faults: is each answered by the right level, and are clean batches left alone (about 5 minutes)"
    ),
    "history": BenchEntry(
        "history drafter on a second epoch: accepted length, and what its proposals cost (about 5 minutes)"
    ),
    "hosts": BenchEntry(
        "TRL's own generation with the variable PACELINE and without, batch by batch (at most 30 minutes)",
        _settings_elsewhere,
    ),
    "peers": BenchEntry(
        "our loop against stock TRL's: generation by token, and the rest of a step; three seeds (about 10 minutes)",
        _runs_elsewhere,
    ),
    "fp8": BenchEntry(
        "FP8 while the policy moves: tensors after each update, KV scales, what that costs (about 30 minutes)"
    ),
    "drafter": BenchEntry(
        "does the drafter follow the policy for free and give way at once, as documented too (one to two hours)",
        _runs,
    ),
    "learning": BenchEntry("gain in held-out accuracy by RL on the arena, three seeds (about 17 minutes)", _runs),
    "overhead": BenchEntry(
        "tokens/s through our engine against bare vllm.LLM; a second start against the first (about 6 minutes)",
        _environment,
    ),
    "plan": BenchEntry(
        "the simulator behind `paceline plan` against published figures; --arena: engines here (about 2 minutes; 26)",
        _plan,
        on_arena="plan_arena",
    ),
    "precision": BenchEntry(
        "FP8 against BF16 with and without speculation: speed, KV capacity, mismatch (about 30 minutes)",
        page="precision_page:write_precision_page",
    ),
    "resume": BenchEntry(
        "a run whose driver is killed 20 times against one that is not, bit for bit; damaged checkpoints (about 45 "
        "minutes)",
        _runs,
    ),
    "rollout": BenchEntry(
        "makespan of groups of siblings with speculation against plain vLLM and every rival (at most 70 minutes)",
        _settings,
        page="rollout_page:write_rollout_page",
    ),
    "selector": BenchEntry("how fast the selector learns from nothing; what a shrinking batch does (about 17 minutes)"),
    "step": BenchEntry(
        "whole RL steps, learner and sync included: plain, with speculation, streamed; four seeds (about 25 minutes)",
        _runs,
    ),
    "stream": BenchEntry(
        "asynchronous against synchronous training: accuracy, idle engines, age; three seeds (about 25 minutes)", _runs
    ),
    "sync": BenchEntry(
        "weight transfer against a plain memory copy; fingerprints; refusal of bad pushes (about 2 minutes)"
    ),
    "training": BenchEntry(
        "drafter training: packed against one document a pass; stall of a checkpoint (about 5 minutes)"
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(parser().parse_args(arguments))


def parser() -> argparse.ArgumentParser:
    return build(
        [*(_command(name, entry) for name, entry in sorted(BENCHES.items())), CERTIFY],
        prog="python -m benchmarks",
        description="Measure arms side by side in one run. See `python -m benchmarks NAME --help`.",
        epilog="example:\n  python -m benchmarks control --json control.json --check",
    )


def _command(name: str, entry: BenchEntry) -> Command:
    page = " --html page.html" if entry.page is not None else ""
    options = list(RESULT)
    if entry.arguments in (_runs, _runs_elsewhere, _settings, _settings_elsewhere, _costs):
        options.append(OVERRIDES)
    if entry.page is not None:
        options.append(HTML)
    if entry.arguments is _costs:
        options.append(COSTS)
    if entry.arguments is _plan:
        options += [
            option("--fit", action="store_true", help="fit the simulator's constants again and print them"),
            option("--arena", action="store_true", help="predicted against measured on this machine's engines"),
            COSTS.but(help="with --arena: cost files of BF16 and of FP8, measured if absent"),
        ]
    return Command(
        words=name,
        help=entry.about,
        examples=f"python -m benchmarks {name}{page} --json {name}.json",
        options=options,
        run=partial(_bench, name),
    )


def _bench(name: str, options: argparse.Namespace, context: Context) -> int:
    entry = BENCHES[name]
    module = name if entry.on_arena is None or not options.arena else entry.on_arena
    result: Result = import_module(f"benchmarks.{module}").run(context=context, **entry.arguments(options))
    if entry.page is not None and options.html is not None:
        drawer, _, function = entry.page.partition(":")
        getattr(import_module(f"benchmarks.{drawer}"), function)(result, options.html)
        print(f"written: {options.html}")
    return publish(result, options)


def _certify(options: argparse.Namespace, context: Context) -> int:
    from benchmarks import certify

    return certify.run(options, context)


COSTS = option("--costs", type=Path, action="append", default=[], metavar="FILE", help="write the selector's prior")
CERTIFY = replace(
    LOSSLESS,
    words="certify",
    help="paceline certify on vLLM's V2 model runner without a GPU, its kernels interpreted (up to 20 minutes)",
    details="",
    examples="""
        python -m benchmarks certify --json certify-v2.json
        python -m benchmarks certify --plant stale      a fault inside the running engine: must be NOT LOSSLESS
        """,
    run=_certify,
)


if __name__ == "__main__":
    sys.exit(main())
