"""Step time by batch size and draft length on this machine, as a prior for the selector.

    python -m benchmarks costs --costs costs.json
    paceline train ... speculation.selector.costs=costs.json

`paceline tune` on the arena: arena:large with its EAGLE-3 drafter unless overrides say otherwise (policy.model,
speculation.drafter.* and rollout.engine.*).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.workload import ENGINE, arena_requests, fastest
from paceline.config import EagleDrafter, EngineConfig, LearnedDrafter, SpeculationConfig, load_config
from paceline.context import Context
from paceline.measure import CpuTimes, Result, environment
from paceline.selector.cost_file import save_costs
from paceline.sessions.tune import BATCHES, LENGTHS, tune
from paceline.sessions.workloads import resolve_drafter, resolve_policy
from paceline.types import RolloutRequest


def run(
    *,
    context: Context,
    costs_file: Path | None = None,
    overrides: Sequence[str] = (),
    model: str = "arena:large",
    repetitions: int = 3,
    seed: int = 0,
) -> Result:
    asked = load_config(None, [f"policy.model={model}", *overrides])
    model = asked.policy.model
    model_path = resolve_policy(model, context)
    drafter = EagleDrafter(path=f"{model}/eagle3") if asked.speculation is None else asked.speculation.drafter
    if isinstance(drafter, LearnedDrafter):
        path = resolve_drafter(drafter.path, context)
        drafter = drafter.model_copy(update={"path": str(path)})
    speculation = SpeculationConfig(drafter=drafter, max_draft_length=max(LENGTHS))
    config = engine_settings(asked.rollout.engine)
    before = CpuTimes.now()
    tuning = tune(
        model_path,
        speculation,
        cost_requests(model_path, seed),
        config,
        context=context,
        repetitions=repetitions,
        seed=seed,
    )
    if costs_file is not None:
        save_costs(costs_file, tuning.costs)
        context.progress(f"cost file: {costs_file}")
    figures = tuning.figures()
    return Result(
        name="costs",
        figures=figures,
        spread=dict.fromkeys(figures, 0.0),
        goals={},
        environment=environment(seeds=[seed], config={"model": model, "engine": config.model_dump(mode="json")}),
        details=tuning.details() | {"steal_share": CpuTimes.now().steal_share_since(before)},
    )


def engine_settings(asked: EngineConfig) -> EngineConfig:
    """The settings of the speculation benches, but for those that were set in `asked`."""
    return fastest(ENGINE).model_copy(update={name: getattr(asked, name) for name in asked.model_fields_set})


def cost_requests(model_path: Path, seed: int) -> list[RolloutRequest]:
    return arena_requests(model_path, num_prompts=max(BATCHES), group_size=1, max_tokens=1, seed=seed)
