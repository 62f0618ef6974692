"""`paceline certify` with a planted fault, or on vLLM's V2 model runner without a GPU.

`--plant FAULT` must give NOT LOSSLESS. `--runner v2` runs the V2 model runner, which GPUs use, on the CPU
(v2_runner.py). The default is arena:tiny with EAGLE-3: 20 minutes. Sampler faults are planted in the running engine
too.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.v2_runner import v2_runner
from paceline.cli.certify import LOSSLESS, certify_lossless
from paceline.cli.parser import option
from paceline.context import Context

if TYPE_CHECKING:
    from paceline.certify.subject import Effort, Fault

_INTERPRETED = ("rollout.engine.max_num_seqs=32", "rollout.engine.deadline_s=1200")
"""A small batch, because an interpreter runs nothing in parallel, and a deadline for a busy machine."""


def run(options: argparse.Namespace, context: Context) -> int:
    if options.runner is None:
        return certify_lossless(options, context, fault=_fault(options.plant))
    if not options.subject:
        options.subject = ["arena:tiny"]
        options.drafter = options.drafter or "eagle3"
    options.subject = [*_INTERPRETED, *options.subject]
    with v2_runner(os.environ, async_scheduling=True):
        fault = _fault(options.plant)
        return certify_lossless(options, context, fault=fault, effort=interpreted(quick=options.quick))


def interpreted(*, quick: bool = False) -> Effort:
    """Return the effort for interpreted kernels, where the verification of a row takes 0.1 to 0.3 s."""
    from paceline.certify.subject import Effort

    effort = Effort(
        sampler_rows=680,
        kinds=("one-hot", "adversarial"),
        lengths=(2,),
        vocabulary=6,
        num_prompts=4,
        samples_per_prompt=64,
        tokens=8,
        long_rollouts=16,
        long_tokens=16,
        exact_length=64,
        max_seconds=1200.0,
    )
    less = replace(
        effort,
        sampler_rows=150,
        num_prompts=2,
        samples_per_prompt=16,
        long_rollouts=3,
        exact_tokens=1000,
        conclusive=False,
    )
    return less if quick else effort


def _fault(name: str | None) -> Fault | None:
    from benchmarks.planted import COUPLED_FAULTS, SAMPLER_FAULTS, RunningSamplerFault, plant
    from paceline.certify.subject import Fault

    if name is None:
        return None
    faults: Mapping[str, Fault] = {
        "logp-shift": Fault(name="logp-shift", about="log-probabilities are shifted by one token", shifts_logp=True)
    } | {
        fault: Fault(
            name=fault,
            about=f"{about}, in the running engine too, where it is larger; with coupling {COUPLED_FAULTS[fault]}",
            sampler=partial(plant, fault=fault),
            engine=RunningSamplerFault(fault),
        )
        for fault, about in SAMPLER_FAULTS.items()
    }
    if name not in faults:
        raise ValueError(f"--plant: got {name!r}; must be one of {', '.join(faults)}")
    return faults[name]


CERTIFY = replace(
    LOSSLESS,
    words="certify",
    help="paceline certify with a planted fault, or on vLLM's V2 model runner without a GPU (up to 20 minutes)",
    details="",
    examples="""
        python -m benchmarks certify --plant residual      must be NOT LOSSLESS
        python -m benchmarks certify --runner v2 --json certify-v2.json
        """,
    options=(
        *LOSSLESS.options,
        option("--plant", metavar="FAULT", help="residual, temperature, stale, accept or logp-shift"),
        option("--runner", choices=("v2",), help="V2's kernels, interpreted on the CPU"),
    ),
    run=run,
)
