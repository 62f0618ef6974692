"""`paceline bench plan --arena`: predicted against measured makespan and step time on this machine, with cost files of the day.

cost files of BF16 and FP8 (bench costs, or --costs) ──▶ simulator ──▶ predicted
the long-tailed batch of bench rollout               ──▶ engines   ──▶ measured    plain, fixed lengths, selector, FP8; in turns
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Arm:
    selector: SelectorConfig | None = None
    """None has no drafter."""
    precision: str = "full"
    """Of weights and KV cache."""


ARMS: Mapping[str, Arm] = {
    "plain": Arm(),
    "k=2": Arm(FixedSelector(draft_length=2)),
    "k=5": Arm(FixedSelector(draft_length=5)),
    "selector": Arm(MeasuredSelector()),
    "fp8": Arm(precision="fp8"),
    "fp8 selector": Arm(MeasuredSelector(), precision="fp8"),
}
PRECISIONS = ("full", "fp8")


def run(
    *,
    progress: Callable[[str], None],
    cache_root: Path,
    cost_files: Sequence[Path] = (),
    model: str = "arena:large",
    repetitions: int = 3,
    num_requests: int = 64,
    seed: int = 0,
) -> Result:
    """`cost_files`: of BF16, then of FP8; what is not there is measured and written there."""
    before = CpuTimes.now()
    files = [*cost_files, *([None] * len(PRECISIONS))]
    costs = {
        precision: _costs(file, precision, model=model, cache_root=cache_root, seed=seed, progress=progress)
        for precision, file in zip(PRECISIONS, files, strict=False)
    }
    model_path = resolve(model, cache_root=cache_root, progress=progress)
    drafter = resolve_drafter("arena", model, cache_root=cache_root, progress=progress)
    speculation = SpeculationConfig(drafter=EagleDrafter(path=str(drafter)), max_draft_length=LONGEST)
    kinds = {
        precision: [None if arm.selector is None else speculation for arm in ARMS.values() if arm.precision == precision]
        for precision in PRECISIONS
    }
    configs = {p: ENGINE.model_copy(update={"kv_cache_gb": 1.0, "weights": p, "kv_cache": p}) for p in PRECISIONS}
    with (
        engines(model_path, kinds["full"], seed=seed, progress=progress, config=configs["full"]) as full,
        engines(model_path, kinds["fp8"], seed=seed, progress=progress, config=configs["fp8"]) as fp8,
    ):
        started = [*full, *fp8]  # in the order of ARMS
        drafting = FixedSelector(draft_length=4)
        work = long_tailed(started[1], model_path, num_requests=num_requests, selector=drafting, max_tokens=640, seed=seed)
        rounds: list[dict[str, Batch]] = []
        for number in range(repetitions + 1):
            orders = [
                (engine, Order(requests=work.requests, selector=arm.selector, name=name, to_the_end=True))
                for engine, (name, arm) in zip(started, ARMS.items(), strict=True)
            ]
            rounds.append({order.name: batch for (_, order), batch in zip(orders, lockstep(orders), strict=True)})
            progress(f"round {number}: " + ", ".join(f"{name} {batch.seconds:.1f} s" for name, batch in rounds[-1].items()))
    warm_up, *counted = rounds
    return _result(counted, predict(costs, work, warm_up), model, seed, CpuTimes.now().steal_share_since(before))


def _costs(file: Path | None, precision: str, *, model: str, cache_root: Path, seed: int, progress: Callable[[str], None]) -> Costs:
    if file is not None and file.is_file():
        return load_costs(file)
    settings = [f"rollout.engine.{part}={precision}" for part in ("weights", "kv_cache")]
    found = bench_costs.run(progress=progress, cache_root=cache_root, costs_file=file, overrides=settings, model=model, seed=seed)
    return Costs.model_validate(found.details["costs"])


def predict(costs: Mapping[str, Costs], work: Workload, warm_up: Mapping[str, Batch]) -> dict[str, Times]:
    """How fast prompts are read is no part of a cost file: it comes from the first step of a round that is not counted."""
    num_prompt_tokens = sum(len(request.prompt_ids) for request in work.requests)
    lengths = Lengths(values=np.sort(np.array(work.lengths, np.float64)), source="the batch itself")
    found = {}
    for name, arm in ARMS.items():
        plain = "plain" if arm.precision == "full" else "fp8"
        prefill = num_prompt_tokens / warm_up[plain].step_s[0][1]
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


def _result(rounds: Sequence[Mapping[str, Batch]], predicted: Mapping[str, Times], model: str, seed: int, steal: float) -> Result:
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
