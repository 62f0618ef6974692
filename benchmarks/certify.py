"""`paceline certify` without a GPU, but on vLLM's V2 model runner, which GPUs use.

Triton's interpreter runs V2's kernels on the CPU (v2_runner.py): up to 20 minutes with arena:tiny and the arena's
EAGLE-3 drafter, which are the default. `--plant` then plants its fault inside the running engine too.
"""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, cast

from benchmarks.v2_runner import v2_runner
from paceline.cli.certify import certify_lossless
from paceline.context import Context

if TYPE_CHECKING:
    from paceline.certify.faults import SamplerFault


def run(options: argparse.Namespace, context: Context) -> int:
    with v2_runner(os.environ, async_scheduling=True):
        from benchmarks.planted.v2_sampler import V2SamplerFault
        from paceline.certify.faults import SAMPLER_FAULTS

        sampler_fault = options.plant if options.plant in SAMPLER_FAULTS else None
        fault = None if sampler_fault is None else V2SamplerFault(cast("SamplerFault", sampler_fault))
        return certify_lossless(options, context, interpreted=True, engine_fault=fault)
