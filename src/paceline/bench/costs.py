"""What a step costs by batch size and draft length on this machine: a cost file, which the selector takes as its prior.

paceline bench costs --costs costs.json
paceline train ... speculation.selector.costs=costs.json

Steps in FP8 have other costs: `rollout.engine.weights=fp8 rollout.engine.kv_cache=fp8` measures those.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from paceline.arena.drafter import resolve_drafter
from paceline.arena.policy import resolve
from paceline.bench.workload import ENGINE, arena_requests, engines
from paceline.config import EagleDrafter, EngineConfig, FixedSelector, SpeculationConfig, load_config
from paceline.evidence.measure import CpuTimes, Result, environment
from paceline.rollout.stepped import Order, SteppedEngine
from paceline.strategy.cost import CostPoint, Costs, Step, save_costs
from paceline.types import RolloutRequest

BATCHES = (1, 2, 4, 8, 16, 32, 64)
LENGTHS = (0, 1, 2, 3, 5, 7)
_STEPS = 14
"""Of one visit to a cell, the first with prompts included."""
Cells = dict[tuple[int, int], list[Step]]
"""By batch size and draft length."""


def run(
    *,
    progress: Callable[[str], None],
    cache_root: Path,
    costs_file: Path | None = None,
    overrides: Sequence[str] = (),
    model: str = "arena:large",
    repetitions: int = 3,
    seed: int = 0,
) -> Result:
    model_path = resolve(model, cache_root=cache_root, progress=progress)
    drafter = resolve_drafter("arena", model, cache_root=cache_root, progress=progress)
    speculation = SpeculationConfig(drafter=EagleDrafter(path=str(drafter)), max_draft_length=max(LENGTHS))
    asked = load_config(None, overrides).rollout.engine
    config = ENGINE.model_copy(update={"weights": asked.weights, "kv_cache": asked.kv_cache})
    before = CpuTimes.now()
    cells: Cells = defaultdict(list)
    with engines(model_path, [speculation], seed=seed, progress=progress, config=config) as (engine,):
        requests = cost_requests(model_path, seed)
        for number in range(repetitions):
            visit_cells(engine, requests, cells, number)
            progress(f"pass {number + 1} of {repetitions} over {len(cells)} cells")
    costs = costs_of(cells, config)
    if costs_file is not None:
        save_costs(costs_file, costs)
        progress(f"cost file: {costs_file}")
    return _result(costs, cells, model, config, seed, CpuTimes.now().steal_share_since(before))


def cost_requests(model_path: Path, seed: int) -> list[RolloutRequest]:
    return arena_requests(model_path, num_prompts=max(BATCHES), group_size=1, max_tokens=1, seed=seed)


def visit_cells(engine: SteppedEngine, requests: Sequence[RolloutRequest], cells: Cells, number: int) -> None:
    """Pass `number` over every batch size and draft length, in an order of its own; what was seen is added to `cells`."""
    order = [(batch, k) for batch in BATCHES for k in LENGTHS]
    random.Random(number).shuffle(order)  # noqa: S311
    for batch, k in order:
        # As many tokens as the steps can emit at the most, so that nobody leaves the batch before they are over.
        work = [replace(request, max_tokens=_STEPS * (k + 1)) for request in requests[:batch]]
        visit = engine.run(Order(requests=work, selector=FixedSelector(draft_length=k), name=f"k={k}", to_the_end=True))
        cells[batch, k] += [step for step in visit.steps[1:_STEPS] if step.verified == k and step.num_requests == batch]


def costs_of(cells: Cells, config: EngineConfig) -> Costs:
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
    return Costs(points=points, acceptance=acceptance, num_trials=trials, weights=config.weights, kv_cache=config.kv_cache)


def _acceptance(steps: Sequence[Step]) -> tuple[tuple[float, ...], int]:
    """Of the requests that had every position before accepted and had a draft token here, the share that had it accepted."""
    reached, accepted = [0] * max(LENGTHS), [0] * max(LENGTHS)
    for step in steps:
        before = step.proposed_at[0] if step.proposed_at else 0
        for position, here in enumerate(step.accepted_at):
            reached[position] += before
            accepted[position] += here
            before = here
    return tuple(a / max(r, 1) for a, r in zip(accepted, reached, strict=True)), reached[0]


def _result(costs: Costs, cells: Cells, model: str, config: EngineConfig, seed: int, steal_share: float) -> Result:
    rate = {cell: sum(step.num_emitted for step in steps) / sum(step.seconds for step in steps) for cell, steps in cells.items()}
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
