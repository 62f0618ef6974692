"""`paceline bench costs`: step time by batch size and draft length on this machine, as a prior for the selector.

paceline bench costs --costs costs.json
paceline train ... speculation.selector.costs=costs.json

The file names model, drafter, machine and engine settings, and a run under other ones refuses it. What is measured is
arena:large with its EAGLE-3 drafter unless overrides say otherwise: policy.model, speculation.drafter.* and
rollout.engine.*.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from paceline.config import (
    EagleDrafter,
    EngineConfig,
    FixedSelector,
    ParallelDrafter,
    SpeculationConfig,
    load_config,
)
from paceline.context import Context
from paceline.lab.bench.workload import ENGINE, arena_requests, engines
from paceline.lab.engines.stepped import Order, SteppedEngine
from paceline.measure import CpuTimes, Result, environment
from paceline.selector.cost import Step
from paceline.selector.cost_file import Conditions, CostPoint, Costs, save_costs
from paceline.sessions.workloads import resolve_drafter, resolve_policy
from paceline.types import RolloutRequest

BATCHES = (1, 2, 4, 8, 16, 32, 64)
LENGTHS = (0, 1, 2, 3, 5, 7)
_STEPS = 14
"""Steps of one visit to a cell, the first, with prompts, included."""
Cells = dict[tuple[int, int], list[Step]]
"""Measured steps by batch size and draft length."""


def run(
    *,
    context: Context,
    costs_file: Path | None = None,
    overrides: Sequence[str] = (),
    model: str = "arena:large",
    repetitions: int = 3,
    seed: int = 0,
) -> Result:
    asked = load_config(None, overrides)
    model = asked.policy.model if "model" in asked.policy.model_fields_set else model
    model_path = resolve_policy(model, context)
    drafter = EagleDrafter(path="arena") if asked.speculation is None else asked.speculation.drafter
    if isinstance(drafter, EagleDrafter | ParallelDrafter):
        path = resolve_drafter(drafter.path, model, context, kind=drafter.kind)
        drafter = drafter.model_copy(update={"path": str(path)})
    speculation = SpeculationConfig(drafter=drafter, max_draft_length=max(LENGTHS))
    config = engine_settings(asked.rollout.engine)
    before = CpuTimes.now()
    cells: Cells = defaultdict(list)
    with engines(model_path, [speculation], seed=seed, context=context, config=config) as (engine,):
        requests = cost_requests(model_path, seed)
        for number in range(repetitions):
            visit_cells(engine, requests, cells, number)
            context.progress(f"pass {number + 1} of {repetitions} over {len(cells)} cells")
    costs = costs_of(cells, Conditions.here(model_path, drafter=drafter.kind, engine=config))
    if costs_file is not None:
        save_costs(costs_file, costs)
        context.progress(f"cost file: {costs_file}")
    return _result(costs, cells, model, config, seed, CpuTimes.now().steal_share_since(before))


def engine_settings(asked: EngineConfig) -> EngineConfig:
    """The settings of the speculation benches, but for those that were set in `asked`."""
    return ENGINE.model_copy(update={name: getattr(asked, name) for name in asked.model_fields_set})


def cost_requests(model_path: Path, seed: int) -> list[RolloutRequest]:
    return arena_requests(model_path, num_prompts=max(BATCHES), group_size=1, max_tokens=1, seed=seed)


def visit_cells(engine: SteppedEngine, requests: Sequence[RolloutRequest], cells: Cells, number: int) -> None:
    """Pass `number` over every batch size and draft length, in an order of its own; what was seen is added to
    `cells`."""
    order = [(batch, k) for batch in BATCHES for k in LENGTHS]
    random.Random(number).shuffle(order)  # noqa: S311
    for batch, k in order:
        # As many tokens as the steps can emit at the most, so that nobody leaves the batch before they are over.
        work = [replace(request, max_tokens=_STEPS * (k + 1)) for request in requests[:batch]]
        visit = engine.run(Order(requests=work, selector=FixedSelector(draft_length=k), name=f"k={k}", to_the_end=True))
        cells[batch, k] += [step for step in visit.steps[1:_STEPS] if step.verified == k and step.num_requests == batch]


def costs_of(cells: Cells, conditions: Conditions) -> Costs:
    points = tuple(
        CostPoint(
            num_requests=batch,
            verified=k,
            drafted=k,
            context_tokens=int(median(step.context_tokens for step in steps)),
            seconds=median(step.seconds for step in steps),
            num_steps=len(steps),
        )
        for (batch, k), steps in sorted(cells.items())
        if steps
    )
    acceptance, trials = _acceptance([step for steps in cells.values() for step in steps])
    return Costs(points=points, acceptance=acceptance, num_trials=trials, measured_on=conditions)


def _acceptance(steps: Sequence[Step]) -> tuple[tuple[float, ...], int]:
    """Share of accepted tokens by position, among requests that had a draft token there and all before it accepted."""
    reached, accepted = [0] * max(LENGTHS), [0] * max(LENGTHS)
    for step in steps:
        before = step.proposed_at[0] if step.proposed_at else 0
        for position, here in enumerate(step.accepted_at):
            reached[position] += before
            accepted[position] += here
            before = here
    return tuple(a / max(r, 1) for a, r in zip(accepted, reached, strict=True)), reached[0]


def _result(costs: Costs, cells: Cells, model: str, config: EngineConfig, seed: int, steal_share: float) -> Result:
    rate = {
        cell: sum(step.num_emitted for step in steps) / sum(step.seconds for step in steps)
        for cell, steps in cells.items()
    }
    best = {batch: max(LENGTHS, key=lambda k, batch=batch: rate[batch, k]) for batch in BATCHES}
    figures = {f"best_length_{batch}": float(k) for batch, k in best.items()}
    figures |= {f"gain_{batch}": rate[batch, k] / rate[batch, 0] for batch, k in best.items()}
    figures |= {f"acceptance_{position}": value for position, value in enumerate(costs.acceptance, start=1)}
    return Result(
        name="costs",
        figures=figures,
        spread=dict.fromkeys(figures, 0.0),
        goals={},
        environment=environment(seeds=[seed], config={"model": model, "engine": config.model_dump(mode="json")}),
        details={
            "tokens_per_s": {f"batch {batch}": {str(k): rate[batch, k] for k in LENGTHS} for batch in BATCHES},
            "costs": costs.model_dump(mode="json"),
            "steal_share": steal_share,
        },
    )
