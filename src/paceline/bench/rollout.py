"""What speculation gains in a rollout phase: arms interleaved on one long-tailed batch of the arena's large policy.

    survey      every fixed draft length, twice: which table would have been best in hindsight
    rounds      plain vLLM, the table of the survey, vLLM's static table, the best fixed lengths, k = 0, BEG-MAB, the selector, and
                the selector with a drafter of random weights, in another order each round

Makespans are ratios within a round, medians over rounds. What a step at (batch, k) costs and emits does not depend on what a table
says for other batch sizes, so the time of a table is a sum over its entries, and the search over all tables is an argmax for each
bucket of batch sizes: exhaustive without trying each one.
"""

from __future__ import annotations

import random
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from paceline.arena.drafter import resolve_drafter
from paceline.arena.policy import resolve
from paceline.bench.workload import ENGINE, Workload, arena_requests, engines, long_tailed, rate
from paceline.config import (
    BanditSelector,
    EagleDrafter,
    FixedSelector,
    MeasuredSelector,
    SelectorConfig,
    SpeculationConfig,
    TableSelector,
)
from paceline.draft.eagle import random_drafter
from paceline.evidence.measure import CpuTimes, Goal, Result, environment, middle
from paceline.rollout.stepped import Batch, SteppedEngine
from paceline.strategy.cost import Step

MAX_DRAFT_LENGTH = 7
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
class Arm:
    name: str
    engine: str
    selector: SelectorConfig | None


def run(
    *,
    progress: Callable[[str], None],
    cache_root: Path,
    model: str = "arena:large",
    drafter: str = "arena",
    repetitions: int = 5,
    num_requests: int = 64,
    seed: int = 0,
) -> Result:
    model_path = resolve(model, cache_root=cache_root, progress=progress)
    drafter_path = resolve_drafter(drafter, model, cache_root=cache_root, progress=progress)
    with tempfile.TemporaryDirectory() as scratch:
        useless = Path(scratch) / "useless"
        random_drafter(drafter_path, useless, seed=seed)
        return _measure(model, model_path, drafter_path, useless, repetitions, num_requests, seed, progress)


def _measure(
    model: str,
    model_path: Path,
    drafter: Path,
    useless: Path,
    repetitions: int,
    num_requests: int,
    seed: int,
    progress: Callable[[str], None],
) -> Result:
    before = CpuTimes.now()
    speculations = {"plain": None, "drafter": _speculation(drafter), "useless": _speculation(useless)}
    with engines(model_path, list(speculations.values()), seed=seed, progress=progress) as started:
        bench = _Bench(dict(zip(speculations, started, strict=True)), progress)
        requests = arena_requests(model_path, num_prompts=num_requests, group_size=1, max_tokens=640, seed=seed)
        work = long_tailed(bench.engines["drafter"], model_path, requests, selector=FixedSelector(draft_length=4))
        progress(f"{len(work.requests)} requests, {sum(work.lengths)} tokens, longest {max(work.lengths)}")
        survey = bench.survey(work)
        table = best_table(survey)
        arms = _arms(table, survey)
        rounds = [bench.round(work, arms, number) for number in range(repetitions)]
    figures, spread = _figures(rounds)
    return Result(
        name="rollout",
        figures=figures,
        spread=spread,
        goals=GOALS,
        environment=environment(seeds=[seed], config={"model": model, "engine": ENGINE.model_dump(mode="json")}),
        details={
            "lengths": sorted(work.lengths),
            "past_end_share": median(work.past_end_share(batch) for batch in rounds[-1].values()),
            "hindsight_table": table,
            "survey_s": {k: [batch.seconds for batch in batches] for k, batches in survey.items()},
            "makespan_s": {arm.name: [batches[arm.name].seconds for batches in rounds] for arm in arms},
            "order": "drawn anew in every round",
            "rate_by_batch": _rates(survey, [batches["plain"] for batches in rounds]),
            "accepted_by_position": _acceptance(rounds),
            "chosen": [asdict(step) for step in rounds[-1]["selector"].steps],
            "selector": rounds[-1]["selector"].figures,
            "steal_share": CpuTimes.now().steal_share_since(before),
        },
    )


def _speculation(drafter: Path) -> SpeculationConfig:
    return SpeculationConfig(drafter=EagleDrafter(path=str(drafter)), max_draft_length=MAX_DRAFT_LENGTH)


class _Bench:
    def __init__(self, started: Mapping[str, SteppedEngine], progress: Callable[[str], None]) -> None:
        self.engines = started
        self._progress = progress

    def survey(self, work: Workload, repetitions: int = 2) -> dict[int, list[Batch]]:
        """Every fixed draft length, in another order each time."""
        batches: dict[int, list[Batch]] = defaultdict(list)
        for number in range(repetitions):
            lengths = list(range(MAX_DRAFT_LENGTH + 1))
            random.Random(number).shuffle(lengths)  # noqa: S311
            for k in lengths:
                batches[k].append(self._run(work, Arm(f"k={k}", "drafter", FixedSelector(draft_length=k))))
        return dict(sorted(batches.items()))

    def round(self, work: Workload, arms: Sequence[Arm], number: int) -> dict[str, Batch]:
        order = list(arms)
        random.Random(1000 + number).shuffle(order)  # noqa: S311
        batches = {arm.name: self._run(work, arm) for arm in order}
        speedup = batches["plain"].seconds / batches["selector"].seconds
        self._progress(f"round {number + 1}: selector {speedup:.2f} times plain")
        return batches

    def _run(self, work: Workload, arm: Arm) -> Batch:
        batch = self.engines[arm.engine].run(work.requests, selector=arm.selector, name=arm.name, to_the_end=True)
        self._progress(f"  {arm.name:14} {batch.seconds:6.2f} s")
        return batch


def _arms(table: Sequence[tuple[int, int, int]], survey: Mapping[int, Sequence[Batch]]) -> list[Arm]:
    by_time = sorted((k for k in survey if k), key=lambda k: median(batch.seconds for batch in survey[k]))
    fixed = [Arm(f"k={k}", "drafter", FixedSelector(draft_length=k)) for k in by_time[:3]]
    return [
        Arm("plain", "plain", None),
        Arm("k=0", "drafter", FixedSelector(draft_length=0)),
        *fixed,
        Arm("static table", "drafter", TableSelector(ranges=STATIC_TABLE)),
        Arm("hindsight", "drafter", TableSelector(ranges=tuple(table))),
        Arm("BEG-MAB", "drafter", BanditSelector()),
        Arm("selector", "drafter", MeasuredSelector()),
        Arm("useless", "useless", MeasuredSelector()),
    ]


def _bucket(num_requests: int) -> tuple[int, int]:
    return next(bucket for bucket in BUCKETS if bucket[0] <= num_requests <= bucket[1])


def _by_bucket(batches: Sequence[Batch]) -> dict[tuple[int, int], list[Step]]:
    found: dict[tuple[int, int], list[Step]] = defaultdict(list)
    for batch in batches:
        for step in batch.steps:
            if step.num_prefill_tokens == 0:
                found[_bucket(step.num_requests)].append(step)
    return found


def best_table(survey: Mapping[int, Sequence[Batch]]) -> list[tuple[int, int, int]]:
    """The draft length with the highest rate in each bucket of batch sizes."""
    rates: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
    for k, batches in survey.items():
        for bucket, steps in _by_bucket(batches).items():
            rates[bucket][k] = rate(steps)
    return [(*bucket, max(by_k, key=by_k.__getitem__)) for bucket, by_k in sorted(rates.items())]


def _tail_rate(batch: Batch) -> float:
    """Tokens per second while at most two requests are in flight."""
    if batch.steps:
        return rate([step for step in batch.steps if step.num_requests <= TAIL_REQUESTS])
    tail = [(active, seconds) for active, seconds in batch.step_s if active <= TAIL_REQUESTS]
    return sum(active for active, _ in tail) / sum(seconds for _, seconds in tail)


def _figures(rounds: Sequence[Mapping[str, Batch]]) -> tuple[dict[str, float], dict[str, float]]:
    def shorter(slow: str, fast: str) -> list[float]:
        return [batches[slow].seconds / batches[fast].seconds for batches in rounds]

    fixed = [name for name in rounds[0] if name.startswith("k=") and name != "k=0"]
    best_fixed = min(fixed, key=lambda name: median(batches[name].seconds for batches in rounds))
    ratios = {
        "makespan_speedup": shorter("plain", "selector"),
        "tail_speedup": [_tail_rate(batches["selector"]) / _tail_rate(batches["plain"]) for batches in rounds],
        "of_hindsight": shorter("hindsight", "selector"),
        "over_beg_mab": shorter("BEG-MAB", "selector"),
        "over_static_table": shorter("static table", "selector"),
        "over_best_fixed": shorter(best_fixed, "selector"),
        "k0_ratio": shorter("plain", "k=0"),
        "useless_drafter_ratio": shorter("plain", "useless"),
        "limit": [_limit(batches) for batches in rounds],
        "accepted_length": [_accepted_length(batches["selector"]) for batches in rounds],
    }
    figures, spread = {}, {}
    for name, values in ratios.items():
        figures[name], spread[name] = middle(values)
    return figures, spread


def _accepted_length(batch: Batch) -> float:
    verified = [step for step in batch.steps if step.verified]
    return 1 + sum(sum(step.accepted_at) for step in verified) / sum(step.proposed_at[0] for step in verified)


def _limit(batches: Mapping[str, Batch]) -> float:
    """Accepted length x plain step / speculative step, weighted by where the selector's tokens are: no draft schedule that takes
    these steps can be faster against a plain engine whose steps take what they take."""
    plain: dict[tuple[int, int], list[float]] = defaultdict(list)
    for active, seconds in batches["plain"].step_s:
        plain[_bucket(active)].append(seconds / active)
    plain_s = speculative_s = 0.0
    for bucket, steps in _by_bucket([batches["selector"]]).items():
        if bucket in plain:
            plain_s += sum(step.num_emitted for step in steps) * median(plain[bucket])
            speculative_s += sum(step.num_emitted for step in steps) / rate(steps)
    return plain_s / speculative_s


def _rates(survey: Mapping[int, Sequence[Batch]], plain: Sequence[Batch]) -> dict[str, dict[str, float]]:
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


def _acceptance(rounds: Sequence[Mapping[str, Batch]]) -> dict[str, list[float]]:
    """Of the drafts that had a token at a position, the share that had it accepted."""
    found = {}
    for arm in ("selector", "useless"):
        proposed, accepted = [0] * MAX_DRAFT_LENGTH, [0] * MAX_DRAFT_LENGTH
        for batches in rounds:
            for step in batches[arm].steps:
                for position, (a, b) in enumerate(zip(step.proposed_at, step.accepted_at, strict=True)):
                    proposed[position] += a
                    accepted[position] += b
        found[arm] = [a / p if p else 0.0 for a, p in zip(accepted, proposed, strict=True)]
    return found
