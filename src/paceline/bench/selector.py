"""How fast the selector learns from nothing, and what happens when the batch shrinks at once. Real engine, arena's large policy.

Convergence: at each batch size a new selector decodes for some hundred steps. Every draft length that it used has a rate, measured
over the whole stretch; what counts is the rate of the lengths chosen around step 200 against that of the lengths chosen at the end.
Rates of whole stretches and not of 20 steps, because the machine drifts by more than 5 % within 20 steps.

Cliff: requests end in blocks, so that the batch falls from 64 to 16, 4 and 1 within few steps; the tokens per second of the 20
steps after each fall are compared with those of the steps that follow at the same batch size.

Stretch: what a stretch of draft length 0 does to acceptance afterwards. Nothing is drafted until the batch has fallen to 16; the
accepted length of the steps that follow is compared with that of an engine that has drafted all the time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from paceline.arena.drafter import resolve_drafter
from paceline.arena.policy import resolve
from paceline.bench.workload import ENGINE, arena_requests, engines, rate
from paceline.config import EagleDrafter, MeasuredSelector, SpeculationConfig, TableSelector
from paceline.evidence.measure import CpuTimes, Result, environment, middle
from paceline.rollout.stepped import Order, SteppedEngine
from paceline.strategy.cost import Step
from paceline.types import RolloutRequest

MAX_DRAFT_LENGTH = 7
BATCHES = (1, 4, 16, 64)
LEARNING_STEPS = 200
FALLS = (64, 16, 4, 1)
AFTER_FALL = 20


def run(
    *, progress: Callable[[str], None], cache_root: Path, model: str = "arena:large", repetitions: int = 3, seed: int = 0
) -> Result:
    model_path = resolve(model, cache_root=cache_root, progress=progress)
    drafter = resolve_drafter("arena", model, cache_root=cache_root, progress=progress)
    speculation = SpeculationConfig(drafter=EagleDrafter(path=str(drafter)), max_draft_length=MAX_DRAFT_LENGTH)
    before = CpuTimes.now()
    with engines(model_path, [speculation], seed=seed, progress=progress) as (engine,):
        requests = arena_requests(model_path, num_prompts=max(BATCHES), group_size=1, max_tokens=1, seed=seed)
        learnt = {batch: _converge(engine, requests[:batch], progress) for batch in BATCHES}
        work = _blocks(requests)
        falls = [_fall(engine, work, number, progress) for number in range(repetitions)]
        stretches = [_after_stretch(engine, work, progress) for _ in range(repetitions)]
    figures = {f"converged_{batch}": ratio for batch, (ratio, _) in learnt.items()}
    spread = dict.fromkeys(figures, 0.0)
    figures["converged"] = min(figures.values())
    figures["after_fall"], spread["after_fall"] = min(
        (middle([ratios[size] for ratios in falls]) for size in FALLS[1:]), key=lambda pair: pair[0]
    )
    figures["acceptance_after_k0"], spread["acceptance_after_k0"] = middle(stretches)
    return Result(
        name="selector",
        figures=figures,
        spread=spread | {"converged": 0.0},
        goals={"converged": (">=", 0.95), "after_fall": (">=", 0.9)},
        environment=environment(seeds=[seed], config={"model": model, "engine": ENGINE.model_dump(mode="json")}),
        details={
            "rate_by_length": {str(batch): rates for batch, (_, rates) in learnt.items()},
            "after_fall": [{str(size): ratio for size, ratio in ratios.items()} for ratios in falls],
            "steal_share": CpuTimes.now().steal_share_since(before),
        },
    )


def _converge(
    engine: SteppedEngine, requests: Sequence[RolloutRequest], progress: Callable[[str], None]
) -> tuple[float, dict[str, float]]:
    """Rate of the draft lengths chosen around step 200 over that of those chosen last; and the rate of each length."""
    room = ENGINE.max_model_len - max(len(request.prompt_ids) for request in requests)
    work = [replace(request, max_tokens=room) for request in requests]
    steps: list[Step] = []
    name = f"from nothing at {len(requests)}"
    while len(steps) < LEARNING_STEPS + 60:  # the selector of this name goes on with what it has learnt
        steps += engine.run(Order(requests=work, selector=MeasuredSelector(), name=name, to_the_end=True)).steps
    steps = [step for step in steps if step.num_prefill_tokens == 0 and step.num_requests == len(requests)]
    rates = _rates(steps)
    early = [rates[step.drafted] for step in steps[LEARNING_STEPS - 20 : LEARNING_STEPS]]
    late = [rates[step.drafted] for step in steps[-40:]]
    ratio = (sum(early) / len(early)) / (sum(late) / len(late))
    progress(f"batch {len(requests)}: {len(steps)} steps, {ratio:.3f} of the final rate after {LEARNING_STEPS}")
    return ratio, {str(k): rate for k, rate in sorted(rates.items())}


def _rates(steps: Sequence[Step]) -> dict[int, float]:
    """Tokens per second of each draft length: emitted per verification over the median step time. The lengths that were hardly
    tried count as the nearest that was."""
    by_length: dict[int, list[Step]] = defaultdict(list)
    for step in steps:
        if step.verified == step.drafted:
            by_length[step.drafted].append(step)
    known = {
        k: sum(step.num_emitted for step in found) / len(found) / median(step.seconds for step in found)
        for k, found in by_length.items()
        if len(found) >= 4
    }
    return {step.drafted: known[min(known, key=lambda k: abs(k - step.drafted))] for step in steps}


def _blocks(requests: Sequence[RolloutRequest]) -> list[RolloutRequest]:
    """64 requests that end in blocks, until 16, 4 and 1 are left."""
    lengths = [120] * (64 - 16) + [300] * (16 - 4) + [480] * (4 - 1) + [660]
    room = ENGINE.max_model_len - max(len(request.prompt_ids) for request in requests)
    return [replace(request, max_tokens=min(length, room)) for request, length in zip(requests, lengths, strict=True)]


def _level(steps: Sequence[Step], size: int) -> list[Step]:
    """Drafts make requests of one block end within some steps of each other; the batch has fallen when the last of them has."""
    return [step for step in steps if step.num_requests == size and step.num_prefill_tokens == 0]


def _fall(engine: SteppedEngine, work: Sequence[RolloutRequest], number: int, progress: Callable[[str], None]) -> dict[int, float]:
    """Tokens per second after each fall over those of the steps that follow at the same batch size."""
    steps = engine.run(Order(requests=work, selector=MeasuredSelector(), name="falls", to_the_end=True)).steps
    levels = {size: _level(steps, size) for size in FALLS[1:]}
    ratios = {size: rate(level[:AFTER_FALL]) / rate(level[AFTER_FALL:]) for size, level in levels.items()}
    progress(f"falls {number + 1}: " + ", ".join(f"to {size}: {ratio:.2f}" for size, ratio in ratios.items()))
    return ratios


def _after_stretch(engine: SteppedEngine, work: Sequence[RolloutRequest], progress: Callable[[str], None]) -> float:
    """Accepted length after a stretch without drafts over that without a stretch."""
    size, k = FALLS[1], 5
    accepted = []
    for name, ranges in (("stretch", ((1, size, k), (size + 1, 64, 0))), ("no stretch", ((1, 64, k),))):
        steps = engine.run(Order(requests=work, selector=TableSelector(ranges=ranges), name=name, to_the_end=True)).steps
        drafted = [step for step in _level(steps, size) if step.verified][:AFTER_FALL]
        accepted.append(1 + sum(sum(step.accepted_at) for step in drafted) / sum(step.proposed_at[0] for step in drafted))
    progress(f"accepted length after a stretch of k = 0: {accepted[0]:.2f}, without one {accepted[1]:.2f}")
    return accepted[0] / accepted[1]
