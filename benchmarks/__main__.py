"""Run a bench: `python -m benchmarks NAME --json FILE [--check] [a.b=value ...]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from benchmarks.certify import CERTIFY
from paceline.cli import run_command
from paceline.cli.common import publish
from paceline.cli.parser import OVERRIDES, RESULT, Command, build
from paceline.context import Context

if TYPE_CHECKING:
    from benchmarks.harness import Record


@dataclass(frozen=True, slots=True)
class Bench:
    about: str
    run: str
    """Module and function."""
    settings: bool = True
    """Accept overrides of a config."""


BENCHES = {
    "control": Bench("control plane, with 16 to 1,024 simulated engines (1 minute)", "control:run", settings=False),
    "correction": Bench(
        "FP8 rollouts, corrected and not, against BF16; three seeds (two hours)", "learning:correction"
    ),
    "coupled": Bench(
        "coupled verification against standard: accepted length and makespan (10 minutes)",
        "coupled:run",
        settings=False,
    ),
    "drafter": Bench(
        "does the drafter follow the policy for free and give way at once (one to two hours)", "drafter:run"
    ),
    "faults": Bench("engines, learner, trainers and driver killed or stopped at random (65 minutes)", "faults:run"),
    "fit": Bench("fit the constants of `paceline plan` again and print them (some minutes)", "fit:run", settings=False),
    "fp8": Bench("FP8 against BF16: speed, KV capacity, mismatch, KV scales (45 minutes)", "fp8:run", settings=False),
    "hosts": Bench("TRL's generation with PACELINE against without (30 minutes)", "hosts:run"),
    "learning": Bench("held-out accuracy gained by RL on the arena, three seeds (17 minutes)", "learning:run"),
    "monitor": Bench(
        "false alarms, power and cost of the losslessness monitor (10 minutes)", "monitor:run", settings=False
    ),
    "peers": Bench("our loop against stock TRL's, three seeds (10 minutes)", "peers:run"),
    "plan": Bench("the simulator of `paceline plan` against published figures (2 minutes)", "plan:run", settings=False),
    "rollout": Bench("makespan with speculation against plain vLLM and rivals (70 minutes)", "rollout:run"),
    "step": Bench("whole RL steps: plain, with speculation, streamed; four seeds (25 minutes)", "step:run"),
    "stream": Bench("asynchronous against synchronous training, three seeds (25 minutes)", "learning:stream"),
    "sync": Bench("weight transfer against a memory copy (2 minutes)", "sync:run", settings=False),
}


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(parser().parse_args(arguments))


def parser() -> argparse.ArgumentParser:
    commands = [
        Command(
            words=name,
            help=bench.about,
            examples=f"python -m benchmarks {name} --json {name}.json",
            options=(*RESULT, *([OVERRIDES] if bench.settings else [])),
            run=partial(_run, name),
        )
        for name, bench in BENCHES.items()
    ]
    return build(
        [*commands, CERTIFY],
        prog="python -m benchmarks",
        description="Measure arms side by side in one run. See `python -m benchmarks NAME --help`.",
        epilog="example:\n  python -m benchmarks control --json control.json --check",
    )


def _run(name: str, options: argparse.Namespace, context: Context) -> int:
    from benchmarks.harness import cpu_times, meanwhile

    bench, before = BENCHES[name], cpu_times()
    module, _, function = bench.run.partition(":")
    run = getattr(import_module(f"benchmarks.{module}"), function)
    record: Record = run(options.overrides if bench.settings else [], context)
    record.details["machine"] = meanwhile(before)
    return publish(record.result(name), options)


if __name__ == "__main__":
    sys.exit(main())
