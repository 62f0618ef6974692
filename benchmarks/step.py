"""A whole RL step, learner and weight sync included: how much faster is it with speculation?

    plain     run.max_age=0, no speculation
    sync      the same with an EAGLE-3 drafter, trained on engines that wait for the tail
    stream    the same with run.max_age=1: the learner takes groups as they finish, and engines continue

The arena with few rollouts a step, so that most of a step is generation, as in runs with long answers. Arms have the
same prompts, updates and correction, and compiled engines in the fastest precision of the machine. They take turns, in
another order for each seed. Ratios are of runs of one seed, without the first steps, in which selectors and caches warm
up. Settings of `speculation` are for sync and stream only.

    step_speedup          seconds of a step, plain over sync; median of the seeds
    step_speedup_stream   plain over stream
    generation_share      share s of generation in a step of the plain arm
    generation_speedup    g: seconds of generation, plain over sync
    of_amdahl             step_speedup over 1 / ((1 - s) + s / g), which g allows if nothing else changes
    tokens_sync, tokens_stream   response tokens over those of plain
    equal_rollouts        share of the first step's rollouts with the same tokens in plain and sync; later steps have
                          other policies once a rollout differs
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.harness import ARENA, Record, by_seed, resolved, train_by_turns
from benchmarks.published.cells import amdahl
from paceline.context import Context
from paceline.devices import fast_precision
from paceline.report.equality import token_checksums
from paceline.report.recorded import RecordedRun
from paceline.types import PacelineError

SEEDS = (0, 1, 2, 3)
WARMUP = 3
"""Uncounted steps at the beginning of a run."""
_DRAFTER = (
    "speculation.drafter.kind=eagle3",
    "speculation.drafter.path=arena:small/eagle3",
    "speculation.training.mode=idle",
    "speculation.verification=coupled",
)
ARMS = {"plain": 0, "sync": 0, "stream": 1}
"""`run.max_age` of each arm; all but plain have a drafter."""
_SETTINGS = (
    "run.steps=18",
    "run.checkpoint_every=0",
    "run.sinks=[]",
    "rollout.prompts_per_step=4",
    "rollout.group_size=4",
    "rollout.engine.compile=true",  # vLLM's default; ours on CPUs is false, because compiling delays the start
    "objective.drop_uniform_groups=false",  # a step without a group to train on would have no learner in it
    "correction.kind=token-tis",
    "eval.every=0",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SteppedRun:
    """Means over the counted steps of one run."""

    step_s: float
    generation_s: float
    """In the stream arm, only the time that the learner waits."""
    learner_s: float
    sync_s: float
    num_tokens: float
    first_tokens: Sequence[str]
    """Checksums of the first step's rollouts."""


def run(overrides: Sequence[str], context: Context) -> Record:
    arms = {arm: settings_of(arm, overrides) for arm in ARMS}
    runs = train_by_turns(arms, SEEDS, context, summarize)
    record = Record(
        goals={"step_speedup": (">=", 1.9), "generation_share": (">=", 0.75), "of_amdahl": (">=", 0.95)},
        seeds=SEEDS,
        config=resolved(ARENA, arms["sync"]),
        details={"arms": arms, "warmup_steps": WARMUP, "runs": by_seed(runs, SEEDS)},
    )
    compare(record, runs)
    return record


def settings_of(arm: str, overrides: Sequence[str]) -> list[str]:
    """Return the settings of an arm; plain stays without speculation."""
    drafts = arm != "plain"
    asked = [one for one in overrides if drafts or not one.startswith("speculation.")]
    dtype = f"rollout.engine.dtype={fast_precision()}"
    return [dtype, *_SETTINGS, *(_DRAFTER if drafts else ()), *asked, f"run.max_age={ARMS[arm]}"]


def summarize(found: RecordedRun, directory: Path) -> SteppedRun:
    """Return means over the counted steps. Raise PacelineError if an update is missing, which would save time."""

    def mean(*keys: str) -> float:
        return float(np.nansum([found.series(key)[WARMUP:] for key in keys]) / len(found.steps[WARMUP:]))

    if len(found.steps) <= WARMUP:
        raise PacelineError(f"run.steps: got {len(found.steps)}; must be above {WARMUP} because those are not counted")
    missing = [
        step for step, count in zip(found.steps, found.series("policy/optimizer_steps"), strict=True) if not count > 0
    ]
    if missing:
        raise PacelineError(f"steps {missing} have no update, so the arms did not do the same work")
    return SteppedRun(
        step_s=mean("time/step"),
        generation_s=mean("time/generation"),
        learner_s=mean("time/logprob", "time/train"),
        sync_s=mean("time/sync"),
        num_tokens=mean("rollout/num_tokens"),
        first_tokens=list(token_checksums(directory).get(1, {}).values()),
    )


def compare(record: Record, runs: Mapping[str, Sequence[SteppedRun]]) -> None:
    """Compare runs that are in the order of their seeds."""
    ratios: dict[str, list[float]] = {}
    for plain, sync, stream in zip(runs["plain"], runs["sync"], runs["stream"], strict=True):
        share, speedup = plain.generation_s / plain.step_s, plain.generation_s / sync.generation_s
        for name, value in {
            "step_speedup": plain.step_s / sync.step_s,
            "step_speedup_stream": plain.step_s / stream.step_s,
            "generation_share": share,
            "generation_speedup": speedup,
            "of_amdahl": plain.step_s / sync.step_s / amdahl(speedup, share),
            "equal_rollouts": float(
                np.mean([a == b for a, b in zip(plain.first_tokens, sync.first_tokens, strict=True)])
            ),
            "tokens_sync": sync.num_tokens / plain.num_tokens,
            "tokens_stream": stream.num_tokens / plain.num_tokens,
        }.items():
            ratios.setdefault(name, []).append(value)
    record.ratios(ratios)
    for arm, found in runs.items():
        record.median(f"step_s_{arm}", [one.step_s for one in found])
