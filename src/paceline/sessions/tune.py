"""Step times and acceptance of an engine on the user's machine, model and prompts.

    engine with the drafter ──▶ a few steps at every batch size and draft length, in mixed order, pass after pass
        ──▶ which draft lengths pay at which batch ──▶ cost file, CUDA graphs, settings for `vllm serve`

The cost file is the selector's prior, so that a run selects well from its first step. It records its conditions, and a
run under other conditions refuses it.
"""

from __future__ import annotations

import json
import random
import shlex
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from paceline.config import (
    Config,
    EagleDrafter,
    EngineConfig,
    FixedSelector,
    MeasuredSelector,
    NgramDrafter,
    ParallelDrafter,
    SpeculationConfig,
)
from paceline.context import Context, time_left
from paceline.drafters.export import drafter_kind
from paceline.rollout.speculation import SCHEDULER, graph_plan, scheduler_settings, speculative_config
from paceline.rollout.stepped import Order, SteppedEngine, stepped_engine
from paceline.selector.cost_file import Conditions
from paceline.selector.tuning import Cells, Tuning, costs_of
from paceline.sessions.workloads import resolve_drafter
from paceline.types import RolloutRequest

BATCHES = (1, 2, 4, 8, 16, 32, 64)
LENGTHS = (0, 1, 2, 3, 5, 7)
_STEPS = 14
"""Steps per visit to a cell, including the first one with prefill."""
_LEARNED = {"eagle3": EagleDrafter, "dflash": ParallelDrafter}


def speculation_with(drafter: str, config: Config, context: Context) -> SpeculationConfig:
    """Return the config's speculation with this drafter: `ngram`, or a path as in the config."""
    wanted = config.speculation or SpeculationConfig(drafter=NgramDrafter(), max_draft_length=max(LENGTHS))
    if drafter == "ngram":
        return wanted.model_copy(update={"drafter": NgramDrafter()})
    path = resolve_drafter(drafter, context)
    learned = _LEARNED[drafter_kind(path, key="--drafter")]
    return wanted.model_copy(update={"drafter": learned(path=str(path.resolve()))})


def tune(
    model_path: Path,
    speculation: SpeculationConfig,
    requests: Sequence[RolloutRequest],
    config: EngineConfig,
    *,
    context: Context,
    repetitions: int = 3,
    seed: int = 0,
) -> Tuning:
    """Measure an engine with these settings; `requests` are prompts for the largest batch."""
    batches = [batch for batch in BATCHES if batch <= min(config.max_num_seqs, len(requests))]
    lengths = [k for k in LENGTHS if k <= speculation.max_draft_length]
    cells: Cells = defaultdict(list)
    context.progress("starting the engine")
    with stepped_engine(model_path, speculation, seed=seed, config=config) as engine:
        began_s = time.monotonic()
        for number in range(repetitions):
            visit_cells(engine, requests, cells, number, batches=batches, lengths=lengths)
            left = time_left((time.monotonic() - began_s) * (repetitions / (number + 1) - 1))
            context.progress(f"pass {number + 1} of {repetitions} over {len(cells)} cells, {left}")
    return Tuning(
        cells=cells, costs=costs_of(cells, Conditions.here(model_path, drafter=speculation.drafter.kind, engine=config))
    )


def visit_cells(
    engine: SteppedEngine,
    requests: Sequence[RolloutRequest],
    cells: Cells,
    number: int,
    *,
    batches: Sequence[int] = BATCHES,
    lengths: Sequence[int] = LENGTHS,
) -> None:
    """Visit every batch size and draft length in the order of pass `number`, and add the steps to `cells`."""
    order = [(batch, k) for batch in batches for k in lengths]
    random.Random(number).shuffle(order)  # noqa: S311
    for batch, k in order:
        # The largest number of tokens that the steps can emit, so that the batch stays full.
        work = [replace(request, max_tokens=_STEPS * (k + 1)) for request in requests[:batch]]
        visit = engine.run(Order(requests=work, selector=FixedSelector(draft_length=k), name=f"k={k}", to_the_end=True))
        cells[batch, k] += [step for step in visit.steps[1:_STEPS] if step.verified == k and step.num_requests == batch]


def room(max_draft_length: int) -> int:
    """Return the maximum number of tokens that a visit adds to a prompt."""
    return _STEPS * (max_draft_length + 1)


def serve_command(
    model_path: Path, speculation: SpeculationConfig, config: EngineConfig, costs_file: Path, *, graphs: bool
) -> str:
    """Return the command that serves the model with the measured settings. `graphs` adds CUDA graphs."""
    plan = graph_plan(speculation, config) if graphs else None
    measured = speculation.model_copy(update={"selector": MeasuredSelector(costs=costs_file)})
    options = {
        "--host": "127.0.0.1",  # vLLM's default is every address
        "--dtype": config.dtype,
        "--tensor-parallel-size": str(config.tensor_parallel_size),
        "--max-num-seqs": str(config.max_num_seqs),
        "--scheduler-cls": SCHEDULER,
        "--speculative-config": json.dumps(speculative_config(speculation, config, plan)),
        "--additional-config": json.dumps({"paceline": scheduler_settings(measured, plan)}),
    }
    if plan is not None:
        options["--compilation-config"] = json.dumps({"cudagraph_capture_sizes": plan.capture_sizes})
    return " \\\n    ".join(
        (
            f"vllm serve {shlex.quote(str(model_path.resolve()))}",
            *(f"{name} {shlex.quote(value)}" for name, value in options.items()),
        )
    )
