"""Predicted against measured makespan and step time on this machine.

cost files of BF16 and FP8             ──▶ simulator ──▶ predicted
the long-tailed batch of bench rollout ──▶ engines   ──▶ measured    plain, a fixed length, the selector, FP8; in turns

Step costs are measured between the rounds of what they predict, on the same engines: a machine whose speed drifts
drifts for both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.costs import cost_requests
from benchmarks.workload import ENGINE, RequestSet, long_tailed
from paceline.config import EagleDrafter, FixedSelector, MeasuredSelector, SelectorConfig, SpeculationConfig
from paceline.context import Context
from paceline.measure import CpuTimes, Result, environment, middle
from paceline.plan.engine_model import MeasuredModel
from paceline.plan.lengths import Lengths
from paceline.plan.run_model import Scenario, Times, simulate
from paceline.rollout.stepped import Order, SteppedBatch, SteppedEngine, lockstep, stepped_engine
from paceline.selector.cost import Step
from paceline.selector.cost_file import Conditions, Costs, load_costs, save_costs
from paceline.selector.tuning import Cells, costs_of
from paceline.sessions.tune import visit_cells
from paceline.sessions.workloads import resolve_drafter, resolve_policy

LONGEST = 7


@dataclass(frozen=True, slots=True)
class ArenaArm:
    selector: SelectorConfig | None = None
    """None has no drafter."""
    precision: str = "full"
    """Precision of weights and KV cache."""


ARMS: Mapping[str, ArenaArm] = {
    "plain": ArenaArm(),
    "k=5": ArenaArm(FixedSelector(draft_length=5)),
    "selector": ArenaArm(MeasuredSelector()),
    "fp8": ArenaArm(precision="fp8"),
    "fp8 selector": ArenaArm(MeasuredSelector(), precision="fp8"),
}
PRECISIONS = ("full", "fp8")


def run(
    *,
    context: Context,
    cost_files: Sequence[Path] = (),
    model: str = "arena:large",
    repetitions: int = 3,
    num_requests: int = 64,
    seed: int = 0,
) -> Result:
    """`cost_files`: of BF16, then of FP8; those that are not there are measured, a pass before every round, and
    written."""
    before = CpuTimes.now()
    files = dict(zip(PRECISIONS, cost_files, strict=False))
    costs = {precision: load_costs(file) for precision, file in files.items() if file.is_file()}
    cells: dict[str, Cells] = {precision: defaultdict(list) for precision in PRECISIONS if precision not in costs}
    model_path = resolve_policy(model, context)
    drafter = resolve_drafter(f"{model}/eagle3", context)
    speculation = SpeculationConfig(drafter=EagleDrafter(path=str(drafter)), max_draft_length=LONGEST)
    configs = {p: ENGINE.model_copy(update={"kv_cache_gb": 1.5, "weights": p, "kv_cache": p}) for p in PRECISIONS}
    rounds: list[dict[str, SteppedBatch]] = []
    with ExitStack() as stack:
        started: dict[str, SteppedEngine] = {}
        for name, arm in ARMS.items():
            context.progress(f"starting the engine of {name}")
            how = None if arm.selector is None else speculation
            started[name] = stack.enter_context(
                stepped_engine(model_path, how, seed=seed, config=configs[arm.precision])
            )
        drafting = {arm.precision: started[name] for name, arm in ARMS.items() if arm.selector is not None}
        work = long_tailed(
            drafting["full"],
            model_path,
            num_requests=num_requests,
            selector=FixedSelector(draft_length=4),
            max_tokens=640,
            seed=seed,
        )
        requests = cost_requests(model_path, seed)
        for number in range(repetitions + 1):
            orders = [
                (started[name], Order(requests=work.requests, selector=arm.selector, name=name, to_the_end=True))
                for name, arm in ARMS.items()
            ]
            rounds.append({order.name: batch for (_, order), batch in zip(orders, lockstep(orders), strict=True)})
            context.progress(
                f"round {number}: " + ", ".join(f"{name} {batch.seconds:.1f} s" for name, batch in rounds[-1].items())
            )
            if number < repetitions:
                for precision, seen in cells.items():
                    visit_cells(drafting[precision], requests, seen, number)
                    context.progress(
                        f"step costs, weights and KV cache {precision}: pass {number + 1} of {repetitions}"
                    )
    for precision, seen in cells.items():
        conditions = Conditions.here(model_path, drafter=speculation.drafter.kind, engine=configs[precision])
        costs[precision] = costs_of(seen, conditions)
        if precision in files:
            save_costs(files[precision], costs[precision])
    warm_up, *counted = rounds
    return _result(counted, predict(costs, work, warm_up), model, seed, CpuTimes.now().steal_share_since(before))


def predict(costs: Mapping[str, Costs], work: RequestSet, warm_up: Mapping[str, SteppedBatch]) -> dict[str, Times]:
    """How fast prompts are read is no part of a cost file: it comes from the first steps of a round that is not
    counted."""
    num_prompt_tokens = sum(len(request.prompt_ids) for request in work.requests)
    reading: dict[str, list[Step]] = {precision: [] for precision in PRECISIONS}
    for name, arm in ARMS.items():
        reading[arm.precision] += [step for step in warm_up[name].steps if step.num_prefill_tokens]
    lengths = Lengths(values=np.sort(np.array(work.lengths, np.float64)), source="the batch itself")
    found = {}
    for name, arm in ARMS.items():
        steps = reading[arm.precision]
        prefill = sum(step.num_prefill_tokens for step in steps) / sum(step.seconds for step in steps)
        found[name] = simulate(
            Scenario(
                model=MeasuredModel.of(costs[arm.precision], longest=LONGEST, prefill_tokens_per_s=prefill),
                num_engines=1,
                num_groups=len(work.requests),
                group_size=1,
                lengths=lengths,
                prompt_tokens=num_prompt_tokens // len(work.requests),
                max_num_seqs=ENGINE.max_num_seqs,
                selector=arm.selector,
            )
        )
    return found


def _result(
    rounds: Sequence[Mapping[str, SteppedBatch]], predicted: Mapping[str, Times], model: str, seed: int, steal: float
) -> Result:
    figures: dict[str, float] = {}
    spread: dict[str, float] = {}
    details: dict[str, dict[str, float]] = {}
    errors: list[float] = []
    for name, times in predicted.items():
        makespan, width = middle([group[name].seconds for group in rounds])
        step_s = median(group[name].seconds / len(group[name].step_s) for group in rounds)
        details[name] = {
            "measured_s": makespan,
            "predicted_s": times.generation_s,
            "measured_step_s": step_s,
            "predicted_step_s": times.engine_step_s,
        }
        word = name.replace("=", "").replace(" ", "_")
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
        details={"arms": details, "steal_share": steal},
    )
