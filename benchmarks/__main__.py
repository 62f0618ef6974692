"""Run a bench: `python -m benchmarks NAME --json FILE [--check] [a.b=value ...]`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli import add_verbose, run_command
from paceline.cli.certify import add_lossless_options
from paceline.cli.common import CONFIGS, add_result_options, publish
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
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Each bench measures its arms side by side in one run; `python -m benchmarks NAME --help` says "
        "more.",
        epilog="example:\n  python -m benchmarks control --json control.json --check",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    benches = parser.add_subparsers(required=True, metavar="NAME")
    for name, entry in sorted(BENCHES.items()):
        _add_bench(benches.add_parser, name, entry)
    _add_certify(benches.add_parser)
    add_verbose(parser)
    return parser


def _add_certify(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    about = "paceline certify on vLLM's V2 model runner without a GPU, its kernels interpreted (up to 20 minutes)"
    parser = add_parser(
        "certify",
        help=about,
        description=about,
        epilog="examples:\n"
        "  python -m benchmarks certify --json certify-v2.json\n"
        "  python -m benchmarks certify --plant stale      a fault inside the running engine: must be NOT LOSSLESS",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_lossless_options(parser)
    parser.set_defaults(command=_certify)


def _certify(options: argparse.Namespace, context: Context) -> int:
    from benchmarks import certify

    return certify.run(options, context)


def _add_bench(add_parser: Callable[..., argparse.ArgumentParser], name: str, entry: BenchEntry) -> None:
    page = " --html page.html" if entry.page is not None else ""
    parser = add_parser(
        name,
        help=entry.about,
        description=entry.about,
        epilog=f"example:\n  python -m benchmarks {name}{page} --json {name}.json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    parser.set_defaults(command=_bench, name=name, overrides=[], html=None, costs=[], fit=False, arena=False)
    if entry.arguments in (_runs, _runs_elsewhere, _settings, _settings_elsewhere, _costs):
        add("overrides", nargs="*", metavar="a.b=value", help="settings of what is measured")
    if entry.page is not None:
        add("--html", type=Path, metavar="FILE", help="write tables and pictures as one page")
    if entry.arguments is _costs:
        add("--costs", type=Path, action="append", metavar="FILE", help="write the selector's prior to FILE")
    if entry.arguments is _plan:
        add("--fit", action="store_true", help="fit the simulator's constants again and print them")
        add("--arena", action="store_true", help="predicted against measured on this machine's engines")
        costs = "with --arena: cost files of BF16 and of FP8, measured if absent"
        add("--costs", type=Path, action="append", metavar="FILE", help=costs)
    add_result_options(parser)


def _bench(options: argparse.Namespace, context: Context) -> int:
    entry = BENCHES[options.name]
    module = entry.on_arena if options.arena and entry.on_arena is not None else options.name
    result: Result = import_module(f"benchmarks.{module}").run(context=context, **entry.arguments(options))
    if options.html is not None and entry.page is not None:
        drawer, _, function = entry.page.partition(":")
        getattr(import_module(f"benchmarks.{drawer}"), function)(result, options.html)
        print(f"written: {options.html}")
    return publish(result, options)


if __name__ == "__main__":
    sys.exit(main())
