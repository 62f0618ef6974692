"""Cost of coupled verification: accepted length and makespan against standard verification, sampled drafts and greedy.

    coupled_over_standard_length_*      accepted length at a fixed draft length, drafts sampled in both arms
    coupled_over_standard_makespan_*    seconds of standard over seconds of coupled, with the selector; above 1, coupled
                                        is faster
    greedy_over_standard_*              the same for greedy drafts under standard verification

The arms of a round take turns on the same requests, which run to given lengths, so that all arms do the same work.
Every round has other seeds. Figures are ratios within a round, medians over rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from benchmarks.harness import Record
from benchmarks.rollout import accepted_length
from benchmarks.workload import engines, fastest, grouped
from paceline.config import EngineConfig, FixedSelector, MeasuredSelector, SelectorConfig, SpeculationConfig
from paceline.context import Context
from paceline.measure import Goal
from paceline.rollout.stepped import Order, SteppedBatch, lockstep
from paceline.sessions.workloads import resolve_drafter, resolve_policy

KINDS: tuple[Literal["eagle3", "dflash"], ...] = ("eagle3", "dflash")
ARMS = {
    "standard": {"verification": "standard"},
    "coupled": {"verification": "coupled"},
    "greedy": {"verification": "standard", "draft_sampling": "greedy"},
}
GOALS: dict[str, Goal] = {f"coupled_over_standard_makespan_{kind}": (">=", 0.97) for kind in KINDS}
"""3 % of makespan: coupled verification is the default if it costs less."""
_MODEL = "arena:small"
_ENGINE = EngineConfig(max_model_len=768, max_num_seqs=64, kv_cache_gb=1.0)
_DRAFT_LENGTH, _ROUNDS = 5, 6
_PROMPTS, _SIBLINGS = 8, 8
_SELECTORS: dict[str, SelectorConfig] = {
    "fixed": FixedSelector(draft_length=_DRAFT_LENGTH),
    "selector": MeasuredSelector(),
}
Round = Mapping[str, Mapping[str, SteppedBatch]]
"""Batches by selector and arm."""


def run(overrides: Sequence[str], context: Context) -> Record:
    del overrides
    model_path, config = resolve_policy(_MODEL, context), fastest(_ENGINE)
    context.progress("drawing lengths")
    with engines(model_path, [None], seed=0, context=context, config=config) as (plain,):
        work = grouped(plain, model_path, num_prompts=_PROMPTS, group_size=_SIBLINGS, max_tokens=640)
    record = Record(goals=GOALS, config={"model": _MODEL, "engine": config.model_dump(mode="json")})
    for kind in KINDS:
        drafter = {"kind": kind, "path": str(resolve_drafter(f"{_MODEL}/{kind}", context))}
        speculations = [_speculation(drafter, arm) for arm in ARMS.values()]
        with engines(model_path, speculations, seed=1, context=context, config=config) as started:
            rounds: list[Round] = []
            for number in range(-1, _ROUNDS):  # the first warms up caches and selectors
                requests = [replace(one, seed=(one.seed or 0) + 1000 * number) for one in work.requests]
                found: dict[str, Mapping[str, SteppedBatch]] = {}
                for name, selector in _SELECTORS.items():
                    order = Order(
                        requests=requests, selector=selector, name=name, to_the_end=True, forget_prefixes=True
                    )
                    batches = lockstep([(engine, order) for engine in started])
                    found[name] = dict(zip(ARMS, batches, strict=True))
                context.progress(f"{kind}: round {number + 1} of {_ROUNDS}")
                rounds += [found] if number >= 0 else []
        record.ratios({f"{name}_{kind}": values for name, values in _ratios(rounds).items()})
        for arm in ARMS:
            lengths = [accepted_length(found["fixed"][arm]) for found in rounds]
            record.median(f"accepted_length_{arm}_{kind}", lengths)
    record.details |= {"arms": ARMS, "draft_length": _DRAFT_LENGTH, "lengths": work.lengths}
    return record


def _speculation(drafter: Mapping[str, str], arm: Mapping[str, str]) -> SpeculationConfig:
    of_drafter = {name: value for name, value in arm.items() if name == "draft_sampling"}
    return SpeculationConfig.model_validate({"drafter": {**drafter, **of_drafter}, "verification": arm["verification"]})


def _ratios(rounds: Sequence[Round]) -> dict[str, list[float]]:
    """Return one value per round of each figure."""
    return {
        f"{arm}_over_standard_length": [
            accepted_length(found["fixed"][arm]) / accepted_length(found["fixed"]["standard"]) for found in rounds
        ]
        for arm in ("coupled", "greedy")
    } | {
        f"{arm}_over_standard_makespan": [
            found["selector"]["standard"].seconds / found["selector"][arm].seconds for found in rounds
        ]
        for arm in ("coupled", "greedy")
    }
