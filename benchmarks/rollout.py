"""Makespan of a rollout phase with speculation: arms interleaved on groups of siblings of the arena's large policy.

    ridge       tokens of a step at which computing takes as long as reading the weights: prefill tokens per second x
                seconds of a step of one token
    survey      every fixed draft length at 16 active, two siblings of each group: the best table in hindsight
    rounds      groups of arms, one after another; the selector continues to learn
                  16 active  plain vLLM, the selector, the survey's table
                  16 active  the selector, the simple selector; half of the siblings
                  16 active  plain vLLM, k = 0, the best fixed length, the selector with a useless drafter; two siblings
                             of each group
                  64 active  plain vLLM, the selector; half of the siblings, so that none waits

The batch is 16 prompts x 8 siblings with the policy's own lengths (`workload.grouped`). At most 16 or 64 requests run
while the others wait. Cached prefixes are dropped before each batch, as after a weight sync, so only siblings share a
prompt. Plain vLLM has the same settings. `decode_speedup_at_ridge` compares machines: tokens per second while about 0.4
of the measured ridge are active.

The arms of a group take turns, each on an engine of its own, a hundredth of the batch (a few steps) at a time, so that
drift of the machine slows all of them alike; an arm's seconds are those of its own steps. Figures are ratios within a
group, medians over rounds. Overrides name the drafter and the longest draft.
"""

from __future__ import annotations

import math
import random
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.harness import Record, cpu_times, meanwhile
from benchmarks.workload import (
    ENGINE,
    MODEL,
    SOURCE,
    RequestSet,
    Ridge,
    arena_requests,
    asked_for,
    drafter_path,
    engines,
    fastest,
    grouped,
    past_end_share,
    random_drafter,
    rate,
)
from paceline.config import (
    FixedSelector,
    MeasuredSelector,
    SelectorConfig,
    SimpleSelector,
    SpeculationConfig,
    TableSelector,
)
from paceline.context import Context
from paceline.measure import Goal
from paceline.rollout.stepped import Order, SteppedBatch, SteppedEngine, lockstep
from paceline.selector.cost import Step
from paceline.sessions.workloads import resolve_policy

CONFIG = ENGINE.model_copy(update={"kv_cache_gb": 1.5})
"""KV cache of each of four engines side by side; in bfloat16 the batch needs less than half of it."""
NUM_PROMPTS, GROUP_SIZE = 16, 8
ACTIVE, MANY_ACTIVE = 16, 64
ROUNDS = 4
RIDGE_SHARE = 0.4
PART = 0.01
"""Share of a batch that an arm generates in its turn: a few steps."""
GOALS: dict[str, Goal] = {
    "makespan_speedup": (">=", 3.0),
    "makespan_speedup_64": (">=", 2.2),
    "of_hindsight": (">=", 0.97),
    "over_simple_selector": (">=", 1.0),
    "k0_ratio": (">=", 0.97),
    "useless_drafter_ratio": (">=", 0.98),
}


BUCKETS = ((1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 32), (33, 64))
Bucket = tuple[int, int]
Group = Mapping[str, SteppedBatch]
"""Batches of arms that took turns, by arm."""
Round = Sequence[Group]


@dataclass(frozen=True, slots=True)
class RolloutArm:
    name: str
    selector: SelectorConfig | None = None
    engine: str = "drafter"


@dataclass(frozen=True, slots=True)
class _ArmGroup:
    """Arms that take turns on the same work."""

    arms: Sequence[RolloutArm]
    work: RequestSet
    most_active: int = ACTIVE


PLAIN = RolloutArm("plain", None, "plain")
SELECTOR = RolloutArm("selector", MeasuredSelector())
USELESS = RolloutArm("useless", MeasuredSelector(), "useless")


def run(overrides: Sequence[str], context: Context) -> Record:
    asked = asked_for(overrides)
    drafter = drafter_path(asked, context)
    with tempfile.TemporaryDirectory() as scratch:
        useless = Path(scratch) / "useless"
        random_drafter(drafter, useless, seed=0)
        kinds = {"plain": None, "useless": _with_drafter(asked, useless), "drafter": _with_drafter(asked, drafter)}
        return _measure(kinds, kinds["drafter"], context)


def _with_drafter(speculation: SpeculationConfig, path: Path) -> SpeculationConfig:
    return speculation.model_copy(update={"drafter": speculation.drafter.model_copy(update={"path": str(path)})})


def _measure(kinds: Mapping[str, SpeculationConfig | None], drafts: SpeculationConfig, context: Context) -> Record:
    model_path, config = resolve_policy(MODEL, context), fastest(CONFIG)
    context.progress("drawing lengths")
    small = resolve_policy(SOURCE, context)
    with engines(small, [None], seed=0, context=context, config=config) as (one,):
        work = grouped(one, small, num_prompts=NUM_PROMPTS, group_size=GROUP_SIZE, max_tokens=640)
    context.progress(f"{len(work.requests)} requests, {sum(work.lengths)} tokens, longest {max(work.lengths)}")
    with engines(model_path, [*kinds.values(), drafts], seed=0, context=context, config=config) as started:
        arms = _Arms(dict(zip(kinds, (started[:1], started[1:2], started[2:]), strict=True)), context)
        ridges = [arms.ridge(model_path, seed) for seed in (1, 2, 3)]
        survey = arms.survey(_every(4, work), drafts.max_draft_length)
        table = best_table(survey)
        groups = _groups(survey, table, work)
        rounds, machine = arms.rounds(groups)
    subject = {"model": MODEL, "drafter": drafts.drafter.kind, "max_draft_length": drafts.max_draft_length}
    record = Record(goals=GOALS, config=subject | {"engine": config.model_dump(mode="json")})
    record.ratios(ratios(rounds))
    record.median("ridge_tokens", [ridge.tokens for ridge in ridges])
    by_batch = speedup_by_batch([round_[0] for round_ in rounds])
    at_ridge = bucket_of(max(1, min(ACTIVE, round(RIDGE_SHARE * record.figures["ridge_tokens"]))))
    record.add("decode_speedup_at_ridge", by_batch.get(name_of(at_ridge), math.nan))
    record.add("length_median", float(np.median(work.lengths)))
    record.add("length_p99", float(np.quantile(work.lengths, 0.99)))
    record.add("length_max", max(work.lengths))
    record.details |= {
        "lengths": work.lengths,
        "past_end_share": median(past_end_share(batch.token_ids, work.end_ids) for batch in rounds[-1][0].values()),
        "ridge": [asdict(ridge) for ridge in ridges],
        "hindsight_table": table,
        "survey_s": {k: [batch.seconds for batch in batches] for k, batches in survey.items()},
        "makespan_s": [[{arm: batch.seconds for arm, batch in group.items()} for group in one] for one in rounds],
        "speedup_by_batch": by_batch,
        "chosen": [asdict(step) for step in rounds[-1][0]["selector"].steps],
        "selector": rounds[-1][0]["selector"].figures,
        "rounds": machine,
    }
    return record


def _every(nth: int, work: RequestSet) -> RequestSet:
    """Return a part of every group's siblings."""
    return replace(work, requests=work.requests[::nth])


class _Arms:
    """Run arms on the started engines, by kind of engine."""

    def __init__(self, started: Mapping[str, Sequence[SteppedEngine]], context: Context) -> None:
        self._engines = started
        self._context = context

    def ridge(self, model_path: Path, seed: int) -> Ridge:
        """Measure on plain vLLM, with prompts that are not in the prefix cache."""
        (plain,) = self._engines["plain"]
        prompts = arena_requests(model_path, num_prompts=32, group_size=1, max_tokens=1, seed=seed)
        reading = plain.run(Order(requests=prompts, to_the_end=True, forget_prefixes=True))
        prefill_rate = sum(len(request.prompt_ids) for request in prompts) / reading.seconds
        alone = plain.run(Order(requests=[replace(prompts[0], max_tokens=24)], to_the_end=True))
        step_s = median(seconds for _, seconds in alone.step_s[1:])
        return Ridge(prefill_tokens_per_s=prefill_rate, one_token_s=step_s)

    def survey(self, work: RequestSet, longest: int) -> dict[int, list[SteppedBatch]]:
        """Measure every fixed draft length, in random order."""
        batches: dict[int, list[SteppedBatch]] = {}
        at_once = len(self._engines["drafter"])
        lengths = list(range(longest + 1))
        random.Random(0).shuffle(lengths)  # noqa: S311
        for first in range(0, len(lengths), at_once):
            arms = {k: _fixed(k) for k in lengths[first : first + at_once]}
            group = self._run(_ArmGroup(list(arms.values()), work))
            batches |= {k: [group[arm.name]] for k, arm in arms.items()}
        return dict(sorted(batches.items()))

    def rounds(self, groups: Sequence[_ArmGroup]) -> tuple[list[Round], list[dict[str, float]]]:
        """Run the rounds. Return also the machine's load in each."""
        found: list[Round] = []
        machine: list[dict[str, float]] = []
        for number in range(ROUNDS):
            before = cpu_times()
            found.append([self._run(group) for group in groups])
            machine.append(meanwhile(before))
            speedup = found[-1][0]["plain"].seconds / found[-1][0]["selector"].seconds
            self._context.progress(f"round {number + 1}: selector {speedup:.2f} times plain; {machine[-1]}")
        return found, machine

    def _run(self, group: _ArmGroup) -> dict[str, SteppedBatch]:
        """Run arms by turns, the selector always on the drafter's first engine, which has learned."""
        free = {kind: list(started) for kind, started in self._engines.items()}
        orders = [
            (
                free[arm.engine].pop(0),
                Order(
                    requests=group.work.requests,
                    selector=arm.selector,
                    name=arm.name,
                    to_the_end=True,
                    most_active=group.most_active,
                    forget_prefixes=True,
                ),
            )
            for arm in sorted(group.arms, key=lambda arm: arm is not SELECTOR)
        ]
        batches = {order.name: batch for (_, order), batch in zip(orders, lockstep(orders, PART), strict=True)}
        self._context.progress("  " + ", ".join(f"{name} {batch.seconds:.2f} s" for name, batch in batches.items()))
        return batches


def _fixed(k: int) -> RolloutArm:
    return RolloutArm(f"k={k}", FixedSelector(draft_length=k))


def _groups(
    survey: Mapping[int, Sequence[SteppedBatch]], table: Sequence[tuple[int, int, int]], work: RequestSet
) -> list[_ArmGroup]:
    """Return the first group of arms, and those on other work; 64 active is last."""
    best_fixed = min((k for k in survey if k), key=lambda k: median(batch.seconds for batch in survey[k]))
    hindsight = RolloutArm("hindsight", TableSelector(ranges=tuple(table)))
    return [
        _ArmGroup([PLAIN, SELECTOR, hindsight], work),
        _ArmGroup([SELECTOR, RolloutArm("simple", SimpleSelector())], _every(2, work)),
        _ArmGroup([PLAIN, _fixed(0), USELESS, replace(_fixed(best_fixed), name="best fixed")], _every(4, work)),
        _ArmGroup([PLAIN, SELECTOR], _every(2, work), MANY_ACTIVE),
    ]


def bucket_of(num_requests: int) -> Bucket:
    return next(bucket for bucket in BUCKETS if bucket[0] <= num_requests <= bucket[1])


def name_of(bucket: Bucket) -> str:
    return f"{bucket[0]}-{bucket[1]}"


def _by_bucket(batches: Sequence[SteppedBatch]) -> dict[Bucket, list[Step]]:
    """Return the steps that read no prompts."""
    found: dict[Bucket, list[Step]] = defaultdict(list)
    for batch in batches:
        for step in batch.steps:
            if step.num_prefill_tokens == 0:
                found[bucket_of(step.num_requests)].append(step)
    return found


def best_table(survey: Mapping[int, Sequence[SteppedBatch]]) -> list[tuple[int, int, int]]:
    """Return the draft length with the highest rate for each bucket: the best of all tables, because a table's time is
    a sum over its entries."""
    rates: dict[Bucket, dict[int, float]] = defaultdict(dict)
    for k, batches in survey.items():
        for bucket, steps in _by_bucket(batches).items():
            rates[bucket][k] = rate(steps)
    return [(*bucket, max(by_k, key=by_k.__getitem__)) for bucket, by_k in sorted(rates.items())]


def _plain_token_s(batches: Sequence[SteppedBatch]) -> dict[Bucket, float]:
    """Return seconds of plain vLLM per token: medians, because some steps read prompts too."""
    found: dict[Bucket, list[float]] = defaultdict(list)
    for batch in batches:
        for active, seconds in batch.step_s:
            found[bucket_of(active)].append(seconds / active)
    return {bucket: median(token_s) for bucket, token_s in sorted(found.items())}


def speedup_by_batch(groups: Sequence[Group]) -> dict[str, float]:
    """Return tokens per second of the selector over plain vLLM by batch size, in steps that read no prompts."""
    plain = _plain_token_s([group["plain"] for group in groups])
    chosen = _by_bucket([group["selector"] for group in groups])
    return {name_of(bucket): rate(chosen[bucket]) * plain[bucket] for bucket in plain if bucket in chosen}


def ratios(rounds: Sequence[Round]) -> dict[str, list[float]]:
    """Return one value per round of each figure."""

    def shorter(slow: str, fast: str) -> list[float]:
        """Return ratios within the first group of each round that has both; the last has 64 active."""
        found = [next(group for group in groups[:-1] if slow in group and fast in group) for groups in rounds]
        return [group[slow].seconds / group[fast].seconds for group in found]

    first = [groups[0] for groups in rounds]
    return {
        "makespan_speedup": shorter("plain", "selector"),
        "makespan_speedup_64": [groups[-1]["plain"].seconds / groups[-1]["selector"].seconds for groups in rounds],
        "of_hindsight": shorter("hindsight", "selector"),
        "over_simple_selector": shorter("simple", "selector"),
        "best_fixed_speedup": shorter("plain", "best fixed"),
        "k0_ratio": shorter("plain", "k=0"),
        "useless_drafter_ratio": shorter("plain", "useless"),
        "accepted_length": [accepted_length(group["selector"]) for group in first],
        "equal_rollouts": [equal_rollouts(group) for group in first],
    }


def equal_rollouts(group: Group) -> float:
    """Return the share of requests with the same tokens in all arms."""
    answers = list(zip(*(batch.token_ids for batch in group.values()), strict=True))
    return sum(all(one == arms[0] for one in arms) for arms in answers) / len(answers)


def accepted_length(batch: SteppedBatch) -> float:
    verified = [step for step in batch.steps if step.verified]
    return 1 + sum(step.num_accepted for step in verified) / sum(step.num_verifications for step in verified)
