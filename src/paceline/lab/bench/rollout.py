"""What speculation gains in a rollout phase: arms interleaved on one long-tailed batch of the arena's large policy.

    survey      every fixed draft length, twice: which table would have been best in hindsight
    rounds      three groups of arms, one after another; the selector is in each, and goes on learning
                  plain vLLM, k = 0, the selector, the survey's table, the selector with a drafter of random weights
                  the selector, BEG-MAB, a static table
                  the selector, the two best fixed lengths

The arms of a group take turns, a tenth of the batch each time, each on an engine of its own, so that a machine that
drifts slows all of them alike; an arm's seconds are those of its own steps. Figures are ratios within a group, medians
over rounds.

What a step at (batch, k) costs and emits does not depend on what a table says for other batch sizes. So a table's time
is a sum over its entries, and the search over all tables is an argmax for each bucket of batch sizes: exhaustive
without trying each one.
"""

from __future__ import annotations

import random
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from paceline.config import (
    BanditSelector,
    EagleDrafter,
    FixedSelector,
    MeasuredSelector,
    SelectorConfig,
    SpeculationConfig,
    TableSelector,
)
from paceline.context import Context
from paceline.lab.bench.workload import ENGINE, RequestSet, engines, long_tailed, rate
from paceline.lab.random_drafter import random_drafter
from paceline.measure import CpuTimes, Goal, Result, environment, middle
from paceline.rollout.stepped import Order, SteppedBatch, SteppedEngine, lockstep
from paceline.selector.cost import Step
from paceline.sessions.workloads import resolve_drafter, resolve_policy

MAX_DRAFT_LENGTH = 7
CONFIG = ENGINE.model_copy(update={"kv_cache_gb": 1.5})
"""KV cache of each of five engines side by side; the batch needs less than half of it."""
BUCKETS = ((1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 32), (33, 64))
STATIC_TABLE = ((1, 8, 5), (9, 32, 3), (33, 64, 1))
"""A table as vLLM's documentation would have one write it: long drafts for small batches."""
TAIL_REQUESTS = 2
GOALS: dict[str, Goal] = {
    "makespan_speedup": (">=", 2.5),
    "tail_speedup": (">=", 3.5),
    "of_hindsight": (">=", 0.97),
    "over_beg_mab": (">=", 1.0),
    "over_static_table": (">=", 1.0),
    "over_best_fixed": (">=", 1.0),
    "k0_ratio": (">=", 0.97),
    "useless_drafter_ratio": (">=", 0.98),
}


@dataclass(frozen=True, slots=True)
class RolloutArm:
    name: str
    selector: SelectorConfig | None = None
    engine: str = "drafter"


PLAIN = RolloutArm("plain", None, "plain")
SELECTOR = RolloutArm("selector", MeasuredSelector())
USELESS = RolloutArm("useless", MeasuredSelector(), "useless")


def run(
    *,
    context: Context,
    model: str = "arena:large",
    drafter: str = "arena",
    repetitions: int = 5,
    num_requests: int = 64,
    seed: int = 0,
) -> Result:
    model_path = resolve_policy(model, context)
    drafter_path = resolve_drafter(drafter, model, context)
    with tempfile.TemporaryDirectory() as scratch:
        useless = Path(scratch) / "useless"
        random_drafter(drafter_path, useless, seed=seed)
        return _measure(model, model_path, drafter_path, useless, repetitions, num_requests, seed, context)


def _measure(
    model: str,
    model_path: Path,
    drafter: Path,
    useless: Path,
    repetitions: int,
    num_requests: int,
    seed: int,
    context: Context,
) -> Result:
    before = CpuTimes.now()
    kinds = {"plain": None, "useless": _speculation(useless), "drafter": _speculation(drafter)}
    speculations = [*kinds.values(), kinds["drafter"], kinds["drafter"]]
    with engines(model_path, speculations, seed=seed, context=context, config=CONFIG) as started:
        bench = _RolloutBench(dict(zip(kinds, (started[:1], started[1:2], started[2:]), strict=True)), context)
        drafting = FixedSelector(draft_length=4)
        work = long_tailed(
            started[2], model_path, num_requests=num_requests, selector=drafting, max_tokens=640, seed=seed
        )
        context.progress(f"{len(work.requests)} requests, {sum(work.lengths)} tokens, longest {max(work.lengths)}")
        survey = bench.survey(work)
        table = best_table(survey)
        groups = _groups(table, survey)
        rounds = [bench.round(work, groups, number) for number in range(repetitions)]
    figures, spread = _figures(rounds)
    return Result(
        name="rollout",
        figures=figures,
        spread=spread,
        goals=GOALS,
        environment=environment(seeds=[seed], config={"model": model, "engine": CONFIG.model_dump(mode="json")}),
        details={
            "lengths": sorted(work.lengths),
            "past_end_share": median(work.past_end_share(batch) for batch in rounds[-1][0].values()),
            "hindsight_table": table,
            "survey_s": {k: [batch.seconds for batch in batches] for k, batches in survey.items()},
            "makespan_s": _makespans(rounds),
            "rate_by_batch": _rates(survey, [groups[0]["plain"] for groups in rounds]),
            "accepted_by_position": _acceptance(rounds),
            "chosen": [asdict(step) for step in rounds[-1][0]["selector"].steps],
            "selector": rounds[-1][0]["selector"].figures,
            "steal_share": CpuTimes.now().steal_share_since(before),
        },
    )


def _speculation(drafter: Path) -> SpeculationConfig:
    return SpeculationConfig(drafter=EagleDrafter(path=str(drafter)), max_draft_length=MAX_DRAFT_LENGTH)


Group = Mapping[str, SteppedBatch]
"""Batches by name of the arm, of arms that took turns."""
Round = Sequence[Group]


class _RolloutBench:
    def __init__(self, started: Mapping[str, Sequence[SteppedEngine]], context: Context) -> None:
        self._engines = started
        self._context = context

    def survey(self, work: RequestSet, repetitions: int = 2) -> dict[int, list[SteppedBatch]]:
        """Measure every fixed draft length, beside different arms each time."""
        batches: dict[int, list[SteppedBatch]] = defaultdict(list)
        at_once = len(self._engines["drafter"])
        for number in range(repetitions):
            lengths = list(range(MAX_DRAFT_LENGTH + 1))
            random.Random(number).shuffle(lengths)  # noqa: S311
            for first in range(0, len(lengths), at_once):
                arms = {k: _fixed(k) for k in lengths[first : first + at_once]}
                group = self._run(work, list(arms.values()))
                for k, arm in arms.items():
                    batches[k].append(group[arm.name])
        return dict(sorted(batches.items()))

    def round(self, work: RequestSet, groups: Sequence[Sequence[RolloutArm]], number: int) -> list[Group]:
        found: list[Group] = [self._run(work, arms) for arms in groups]
        speedup = found[0]["plain"].seconds / found[0]["selector"].seconds
        self._context.progress(f"round {number + 1}: selector {speedup:.2f} times plain")
        return found

    def _run(self, work: RequestSet, arms: Sequence[RolloutArm]) -> dict[str, SteppedBatch]:
        """Run arms in turns, the selector always on the drafter's first engine, which holds what it has learnt."""
        free = {kind: list(started) for kind, started in self._engines.items()}
        orders = [
            (
                free[arm.engine].pop(0),
                Order(requests=work.requests, selector=arm.selector, name=arm.name, to_the_end=True),
            )
            for arm in sorted(arms, key=lambda arm: arm is not SELECTOR)
        ]
        batches = {order.name: batch for (_, order), batch in zip(orders, lockstep(orders), strict=True)}
        self._context.progress("  " + ", ".join(f"{name} {batch.seconds:.2f} s" for name, batch in batches.items()))
        return batches


def _fixed(k: int) -> RolloutArm:
    return RolloutArm(f"k={k}", FixedSelector(draft_length=k))


def _groups(
    table: Sequence[tuple[int, int, int]], survey: Mapping[int, Sequence[SteppedBatch]]
) -> list[list[RolloutArm]]:
    by_time = sorted((k for k in survey if k), key=lambda k: median(batch.seconds for batch in survey[k]))
    hindsight = RolloutArm("hindsight", TableSelector(ranges=tuple(table)))
    static = RolloutArm("static table", TableSelector(ranges=STATIC_TABLE))
    return [
        [PLAIN, _fixed(0), SELECTOR, hindsight, USELESS],
        [SELECTOR, RolloutArm("BEG-MAB", BanditSelector()), static],
        [SELECTOR, *map(_fixed, by_time[:2])],
    ]


def _bucket(num_requests: int) -> tuple[int, int]:
    return next(bucket for bucket in BUCKETS if bucket[0] <= num_requests <= bucket[1])


def _by_bucket(batches: Sequence[SteppedBatch]) -> dict[tuple[int, int], list[Step]]:
    found: dict[tuple[int, int], list[Step]] = defaultdict(list)
    for batch in batches:
        for step in batch.steps:
            if step.num_prefill_tokens == 0:
                found[_bucket(step.num_requests)].append(step)
    return found


def best_table(survey: Mapping[int, Sequence[SteppedBatch]]) -> list[tuple[int, int, int]]:
    """The draft length with the highest rate in each bucket of batch sizes."""
    rates: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
    for k, batches in survey.items():
        for bucket, steps in _by_bucket(batches).items():
            rates[bucket][k] = rate(steps)
    return [(*bucket, max(by_k, key=by_k.__getitem__)) for bucket, by_k in sorted(rates.items())]


def _tail_rate(batch: SteppedBatch) -> float:
    """Tokens per second while at most two requests are in flight."""
    if batch.steps:
        return rate([step for step in batch.steps if step.num_requests <= TAIL_REQUESTS])
    tail = [(active, seconds) for active, seconds in batch.step_s if active <= TAIL_REQUESTS]
    return sum(active for active, _ in tail) / sum(seconds for _, seconds in tail)


def _makespans(rounds: Sequence[Round]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = defaultdict(list)
    for groups in rounds:
        for group in groups:
            for name, batch in group.items():
                found[name].append(batch.seconds)
    return dict(found)


def _figures(rounds: Sequence[Round]) -> tuple[dict[str, float], dict[str, float]]:
    def shorter(slow: str, fast: str) -> list[float]:
        """Ratios within the groups that have both."""
        both = [group for groups in rounds for group in groups if slow in group and fast in group]
        return [group[slow].seconds / group[fast].seconds for group in both]

    makespans = _makespans(rounds)
    fixed = [name for name in makespans if name.startswith("k=") and name != "k=0"]
    best_fixed = min(fixed, key=lambda name: median(makespans[name]))
    first = [groups[0] for groups in rounds]
    ratios = {
        "makespan_speedup": shorter("plain", "selector"),
        "tail_speedup": [_tail_rate(group["selector"]) / _tail_rate(group["plain"]) for group in first],
        "of_hindsight": shorter("hindsight", "selector"),
        "over_beg_mab": shorter("BEG-MAB", "selector"),
        "over_static_table": shorter("static table", "selector"),
        "over_best_fixed": shorter(best_fixed, "selector"),
        "k0_ratio": shorter("plain", "k=0"),
        "useless_drafter_ratio": shorter("plain", "useless"),
        "limit": [_limit(group) for group in first],
        "accepted_length": [_accepted_length(group["selector"]) for group in first],
    }
    figures, spread = {}, {}
    for name, values in ratios.items():
        figures[name], spread[name] = middle(values)
    return figures, spread


def _accepted_length(batch: SteppedBatch) -> float:
    verified = [step for step in batch.steps if step.verified]
    return 1 + sum(sum(step.accepted_at) for step in verified) / sum(step.proposed_at[0] for step in verified)


def _limit(batches: Group) -> float:
    """Upper limit of the speed-up: accepted length x plain step / speculative step, weighted by where the selector's
    tokens are. No schedule of draft lengths with these step times can be faster."""
    plain: dict[tuple[int, int], list[float]] = defaultdict(list)
    for active, seconds in batches["plain"].step_s:
        plain[_bucket(active)].append(seconds / active)
    plain_s = speculative_s = 0.0
    for bucket, steps in _by_bucket([batches["selector"]]).items():
        if bucket in plain:
            plain_s += sum(step.num_emitted for step in steps) * median(plain[bucket])
            speculative_s += sum(step.num_emitted for step in steps) / rate(steps)
    return plain_s / speculative_s


def _rates(survey: Mapping[int, Sequence[SteppedBatch]], plain: Sequence[SteppedBatch]) -> dict[str, dict[str, float]]:
    """Tokens per second by batch size and draft length."""
    rates: dict[str, dict[str, float]] = {}
    by_bucket: dict[tuple[int, int], list[tuple[int, float]]] = defaultdict(list)
    for batch in plain:
        for active, seconds in batch.step_s[1:]:
            by_bucket[_bucket(active)].append((active, seconds))
    for bucket, steps in sorted(by_bucket.items()):
        rates.setdefault(f"{bucket[0]}-{bucket[1]}", {})["plain"] = sum(a for a, _ in steps) / sum(s for _, s in steps)
    for k, batches in survey.items():
        for bucket, steps in sorted(_by_bucket(batches).items()):
            rates.setdefault(f"{bucket[0]}-{bucket[1]}", {})[str(k)] = rate(steps)
    return rates


def _acceptance(rounds: Sequence[Round]) -> dict[str, list[float]]:
    """Share of the drafts with a token at a position that had it accepted, by position."""
    found = {}
    for arm in ("selector", "useless"):
        proposed, accepted = [0] * MAX_DRAFT_LENGTH, [0] * MAX_DRAFT_LENGTH
        for groups in rounds:
            for step in groups[0][arm].steps:
                for position, (a, b) in enumerate(zip(step.proposed_at, step.accepted_at, strict=True)):
                    proposed[position] += a
                    accepted[position] += b
        found[arm] = [a / p if p else 0.0 for a, p in zip(accepted, proposed, strict=True)]
    return found
