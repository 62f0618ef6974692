"""How fast the selector learns from nothing, and what a sudden smaller batch does to it.

Convergence: at each batch size a new selector decodes for some hundred steps. What counts is how fast the draft lengths
are that it chose around step 200, against those that it chose at the end. Their rates are measured apart, by stretches
of fixed draft length that take turns: within 20 steps the machine drifts by more than the 5 % in question.

Cliff: most requests end at the same length, so that the batch falls from 64 to 16, to 4 or to 1 within few steps; the
tokens per second of the 20 steps after the fall are compared with those of the steps that follow, over all repetitions
together: one lucky draft is 5 % of the tokens of 20 steps.

Prompts are the arena's longest, and lengths stay below those of their answers: past its end a response is noise that
nobody drafts.

Stretch: what a stretch of draft length 0 does to acceptance afterwards. Nothing is drafted until the batch has fallen
to 16; the accepted length of the steps that follow is compared with that of an engine that has drafted all the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from benchmarks.workload import ENGINE, engines, fastest, long_requests, rate
from paceline.config import EagleDrafter, FixedSelector, MeasuredSelector, SpeculationConfig, TableSelector
from paceline.context import Context
from paceline.measure import CpuTimes, Result, environment, paired
from paceline.rollout.stepped import Order, SteppedEngine
from paceline.selector.cost import Step
from paceline.sessions.workloads import resolve_drafter, resolve_policy
from paceline.types import RolloutRequest

MAX_DRAFT_LENGTH = 7
BATCHES = (1, 4, 16, 64)
LEARNING_STEPS = 200
LENGTH = 400
RATE_LENGTH, RATE_TURNS = 150, 3
FALLS = (16, 4, 1)
"""Requests that remain of 64."""
FALL_AT = 60
"""Tokens of the requests that end early."""
AFTER_FALL = 20


def run(
    *,
    context: Context,
    model: str = "arena:large",
    repetitions: int = 6,
    seed: int = 0,
) -> Result:
    model_path = resolve_policy(model, context)
    drafter = resolve_drafter(f"{model}/eagle3", context)
    speculation = SpeculationConfig(drafter=EagleDrafter(path=str(drafter)), max_draft_length=MAX_DRAFT_LENGTH)
    before, config = CpuTimes.now(), fastest(ENGINE)
    with engines(model_path, [speculation], seed=seed, context=context, config=config) as (engine,):
        requests = long_requests(model_path, num_requests=max(BATCHES), max_tokens=LENGTH, seed=seed)
        learnt = {batch: _converge(engine, requests[-batch:], context) for batch in BATCHES}
        falls = [_fall(engine, requests, number, context) for number in range(repetitions)]
        stretches = [_after_stretch(engine, requests, context) for _ in range(repetitions // 2)]
    figures = {f"converged_{batch}": ratio for batch, (ratio, _) in learnt.items()}
    spread = dict.fromkeys(figures, 0.0)
    figures["converged"] = min(figures.values())
    after = {size: _after_fall([levels[size] for levels in falls]) for size in falls[0]}
    figures |= {f"after_fall_{size}": pooled for size, (pooled, _) in after.items()}
    stretched, interval, pairs = paired(
        {f"after_fall_{size}": ratios for size, (_, ratios) in after.items()} | {"acceptance_after_k0": stretches}
    )
    spread |= interval
    worst = min(after, key=lambda size: after[size][0])
    figures["after_fall"], spread["after_fall"] = figures[f"after_fall_{worst}"], spread[f"after_fall_{worst}"]
    figures["acceptance_after_k0"] = stretched["acceptance_after_k0"]
    return Result(
        name="selector",
        figures=figures,
        spread=spread | {"converged": 0.0},
        goals={"converged": (">=", 0.95), "after_fall": (">=", 0.9)},
        environment=environment(seeds=[seed], config={"model": model, "engine": config.model_dump(mode="json")}),
        details={
            "rate_by_length": {str(batch): rates for batch, (_, rates) in learnt.items()},
            "paired": pairs,
            "steal_share": CpuTimes.now().steal_share_since(before),
        },
    )


def _converge(
    engine: SteppedEngine, requests: Sequence[RolloutRequest], context: Context
) -> tuple[float, dict[str, float]]:
    """Rate of the draft lengths chosen around step 200 over that of those chosen last; and the rate of each length."""
    steps: list[Step] = []
    name = f"from nothing at {len(requests)}"
    while len(steps) < LEARNING_STEPS + 60:  # the selector of this name goes on with what it has learnt
        steps += engine.run(Order(requests=requests, selector=MeasuredSelector(), name=name, to_the_end=True)).steps
    steps = _level(steps, len(requests))
    early = [step.drafted for step in steps[LEARNING_STEPS - 20 : LEARNING_STEPS]]
    late = [step.drafted for step in steps[-40:]]
    rates = _rates(engine, requests, sorted({*early, *late}))
    ratio = (sum(rates[k] for k in early) / len(early)) / (sum(rates[k] for k in late) / len(late))
    context.progress(f"batch {len(requests)}: {len(steps)} steps, {ratio:.3f} of the final rate after {LEARNING_STEPS}")
    return ratio, {str(k): rate for k, rate in rates.items()}


def _rates(engine: SteppedEngine, requests: Sequence[RolloutRequest], lengths: Sequence[int]) -> dict[int, float]:
    """Tokens per second of each draft length at this batch size: medians of turns."""
    short = [replace(request, max_tokens=RATE_LENGTH) for request in requests]
    turns: dict[int, list[float]] = {k: [] for k in lengths}
    for _ in range(RATE_TURNS if len(lengths) > 1 else 1):
        for k in lengths:
            order = Order(requests=short, selector=FixedSelector(draft_length=k), name=f"always {k}", to_the_end=True)
            turns[k].append(rate(_level(engine.run(order).steps, len(requests))))
    return {k: median(found) for k, found in turns.items()}


def _falling(requests: Sequence[RolloutRequest], size: int) -> list[RolloutRequest]:
    """Only `size` of them, the last and longest, go on beyond the fall."""
    num_ending = len(requests) - size
    return [replace(request, max_tokens=FALL_AT) for request in requests[:num_ending]] + list(requests[num_ending:])


def _level(steps: Sequence[Step], size: int) -> list[Step]:
    """Drafts make requests of one length end within some steps of each other; the batch has fallen when the last of
    them has."""
    return [step for step in steps if step.num_requests == size and step.num_prefill_tokens == 0]


def _fall(
    engine: SteppedEngine, requests: Sequence[RolloutRequest], number: int, context: Context
) -> dict[int, list[Step]]:
    """The steps at each size that the batch has fallen to. One selector sees them all, as it would in a run."""
    levels = {}
    for size in FALLS:
        order = Order(requests=_falling(requests, size), selector=MeasuredSelector(), name="falls", to_the_end=True)
        levels[size] = _level(engine.run(order).steps, size)
    context.progress(
        f"falls {number + 1}: " + ", ".join(f"{len(level)} steps at {size}" for size, level in levels.items())
    )
    return levels


def _after_fall(levels: Sequence[Sequence[Step]]) -> tuple[float, list[float]]:
    """Tokens per second after a fall over those of the steps that follow at the same size: of all repetitions, and of
    each."""
    first = [level[:AFTER_FALL] for level in levels]
    later = [level[AFTER_FALL:] for level in levels]
    each = [rate(start) / rate(rest) for start, rest in zip(first, later, strict=True)]
    return rate([step for steps in first for step in steps]) / rate([step for steps in later for step in steps]), each


def _after_stretch(engine: SteppedEngine, requests: Sequence[RolloutRequest], context: Context) -> float:
    """Accepted length after a stretch without drafts over that without a stretch."""
    size, k = FALLS[0], 5
    work = _falling(requests, size)
    accepted = []
    for name, ranges in (("stretch", ((1, size, k), (size + 1, 64, 0))), ("no stretch", ((1, 64, k),))):
        steps = engine.run(
            Order(requests=work, selector=TableSelector(ranges=ranges), name=name, to_the_end=True)
        ).steps
        drafted = [step for step in _level(steps, size) if step.verified][:AFTER_FALL]
        accepted.append(
            1 + sum(step.num_accepted for step in drafted) / sum(step.num_verifications for step in drafted)
        )
    context.progress(f"accepted length after a stretch of k = 0: {accepted[0]:.2f}, without one {accepted[1]:.2f}")
    return accepted[0] / accepted[1]
