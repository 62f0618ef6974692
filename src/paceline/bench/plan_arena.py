"""`paceline bench plan --arena`: predicted against measured makespan and step time on this machine, with a cost file of the day.

cost file (bench costs, or --costs FILE) ──▶ simulator ──▶ predicted
the long-tailed batch of bench rollout   ──▶ engines   ──▶ measured        plain, two fixed lengths, the selector; in turns
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

import numpy as np

from paceline.arena.drafter import resolve_drafter
from paceline.arena.policy import resolve
from paceline.bench import costs as bench_costs
from paceline.bench.workload import ENGINE, Workload, engines, long_tailed
from paceline.config import EagleDrafter, FixedSelector, MeasuredSelector, SelectorConfig, SpeculationConfig
from paceline.evidence.engine_model import MeasuredModel
from paceline.evidence.lengths import Lengths
from paceline.evidence.measure import CpuTimes, Result, environment, middle
from paceline.evidence.run_model import Scenario, Times, simulate
from paceline.rollout.stepped import Batch, Order, lockstep
from paceline.strategy.cost import Costs, load_costs

LONGEST = 7
ARMS: Mapping[str, SelectorConfig | None] = {
    "plain": None,
    "k=2": FixedSelector(draft_length=2),
    "k=5": FixedSelector(draft_length=5),
    "selector": MeasuredSelector(),
}


def run(
    *,
    progress: Callable[[str], None],
    cache_root: Path,
    costs_file: Path | None = None,
    model: str = "arena:large",
    repetitions: int = 3,
    num_requests: int = 64,
    seed: int = 0,
) -> Result:
    before = CpuTimes.now()
    if costs_file is None or not costs_file.is_file():
        measured = bench_costs.run(progress=progress, cache_root=cache_root, costs_file=costs_file, model=model, seed=seed)
        costs = Costs.model_validate(measured.details["costs"])
    else:
        costs = load_costs(costs_file)
    model_path = resolve(model, cache_root=cache_root, progress=progress)
    drafter = resolve_drafter("arena", model, cache_root=cache_root, progress=progress)
    speculation = SpeculationConfig(drafter=EagleDrafter(path=str(drafter)), max_draft_length=LONGEST)
    config = ENGINE.model_copy(update={"kv_cache_gb": 1.5})
    kinds = [None if selector is None else speculation for selector in ARMS.values()]
    with engines(model_path, kinds, seed=seed, progress=progress, config=config) as started:
        drafting = FixedSelector(draft_length=4)
        work = long_tailed(started[1], model_path, num_requests=num_requests, selector=drafting, max_tokens=640, seed=seed)
        rounds: list[dict[str, Batch]] = []
        for number in range(repetitions + 1):
            orders = [
                (engine, Order(requests=work.requests, selector=selector, name=name, to_the_end=True))
                for engine, (name, selector) in zip(started, ARMS.items(), strict=True)
            ]
            rounds.append({order.name: batch for (_, order), batch in zip(orders, lockstep(orders), strict=True)})
            progress(f"round {number}: " + ", ".join(f"{name} {batch.seconds:.1f} s" for name, batch in rounds[-1].items()))
    warm_up, *counted = rounds
    return _result(counted, predict(costs, work, warm_up["plain"]), model, seed, CpuTimes.now().steal_share_since(before))


def predict(costs: Costs, work: Workload, warm_up: Batch) -> dict[str, Times]:
    """How fast prompts are read is no part of a cost file: it comes from the first step of a round that is not counted."""
    num_prompt_tokens = sum(len(request.prompt_ids) for request in work.requests)
    prefill = num_prompt_tokens / warm_up.step_s[0][1]
    engine = MeasuredModel.of(costs, longest=LONGEST, prefill_tokens_per_s=prefill)
    lengths = Lengths(values=np.sort(np.array(work.lengths, np.float64)), source="the batch itself")
    found = {}
    for name, selector in ARMS.items():
        found[name] = simulate(
            Scenario(
                model=engine,
                num_engines=1,
                num_groups=len(work.requests),
                group_size=1,
                lengths=lengths,
                prompt_tokens=num_prompt_tokens // len(work.requests),
                max_num_seqs=ENGINE.max_num_seqs,
                selector=selector,
            )
        )
    return found


def _num_steps(batch: Batch) -> int:
    return len(batch.step_s) or len(batch.steps)


def _result(rounds: Sequence[Mapping[str, Batch]], predicted: Mapping[str, Times], model: str, seed: int, steal: float) -> Result:
    figures: dict[str, float] = {}
    spread: dict[str, float] = {}
    details: dict[str, dict[str, float]] = {}
    errors: list[float] = []
    for name, times in predicted.items():
        makespan, width = middle([group[name].seconds for group in rounds])
        step_s = median(group[name].seconds / _num_steps(group[name]) for group in rounds)
        details[name] = {
            "measured_s": makespan,
            "predicted_s": times.generation_s,
            "measured_step_s": step_s,
            "predicted_step_s": times.engine_step_s,
        }
        word = name.replace("=", "")
        figures[f"error_{word}"], spread[f"error_{word}"] = abs(times.generation_s / makespan - 1), width / makespan
        figures[f"step_error_{word}"], spread[f"step_error_{word}"] = abs(times.engine_step_s / step_s - 1), 0.0
        errors += [figures[f"error_{word}"], figures[f"step_error_{word}"]]
    figures["arena_median_error"], spread["arena_median_error"] = median(errors), max(errors) - min(errors)
    return Result(
        name="plan_arena",
        figures=figures,
        spread=spread,
        goals={"arena_median_error": ("<=", 0.10)},
        environment=environment(seeds=[seed], config={"model": model, "engine": ENGINE.model_dump(mode="json")}),
        details={"arms": details, "steal_share": steal, "left out": "FP8: no arm of this bench runs it yet"},
    )
