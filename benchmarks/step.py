"""How much faster is a whole RL step, learner and weight sync included?

    plain     run.max_age=0, no speculation
    sync      the same with an EAGLE-3 drafter, trained on engines that wait for the tail
    stream    the same with run.max_age=1: the learner takes groups as they finish, and engines go on

All arms are the arena with few rollouts a step, so that as in runs with long answers most of a step is generation; its
share is measured and has a goal. They have the same prompts, number of updates and correction, engines that are
compiled and in the precision that is fastest here, and every group is trained on. They take turns, in another order for
each seed; ratios are of runs of one seed, and the first steps, in which selectors and caches warm up, do not count.
Overrides hold for all arms, but those of `speculation`, such as another drafter, for sync and stream only.

    step_speedup          seconds of a step, plain over sync; median of the seeds
    step_speedup_stream   plain over stream
    generation_share      share s of generation in a step of the plain arm
    generation_speedup    g: seconds of generation, plain over sync
    of_amdahl             step_speedup over 1 / ((1 - s) + s / g), which is what g allows if nothing else changes
    tokens_sync, tokens_stream   response tokens over those of plain: how equal the work was
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from paceline.config import load_config
from paceline.context import Context
from paceline.devices import fast_precision
from paceline.measure import CpuTimes, Result, environment, meanwhile, middle, paired
from paceline.report.recorded import RecordedRun, read_run
from paceline.sessions.train import run as run_session
from paceline.types import PacelineError

WARMUP = 3
"""Steps at the beginning of a run that are not counted."""
_DRAFTER = (
    "speculation.drafter.kind=eagle3",
    "speculation.drafter.path=arena:small/eagle3",
    "speculation.training.mode=idle",
)
ARMS = {"plain": 0, "sync": 0, "stream": 1}
"""`run.max_age` of each arm; all but plain have a drafter."""
_SETTINGS = (
    "run.steps=18",
    "run.checkpoint_every=0",
    "run.sinks=[]",
    "rollout.prompts_per_step=4",
    "rollout.group_size=4",
    "rollout.engine.compile=true",  # as vLLM does by itself; on the CPU our default does not, because it starts slowly
    "objective.drop_uniform_groups=false",  # a step without a group to train on would have no learner in it
    "correction.kind=token-tis",
    "eval.every=0",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SteppedRun:
    """Means over the counted steps of one run."""

    step_s: float
    generation_s: float
    """In the stream arm only what the learner waited for."""
    learner_s: float
    sync_s: float
    num_tokens: float
    accepted_length: float


def run(
    *, context: Context, config_file: Path, overrides: Sequence[str] = (), seeds: Sequence[int] = (0, 1, 2, 3)
) -> Result:
    """Train every arm once per seed, by turns."""
    before = CpuTimes.now()
    settings = {arm: settings_of(arm, overrides) for arm in ARMS}
    runs: dict[str, dict[int, SteppedRun]] = {arm: {} for arm in ARMS}
    names = list(ARMS)
    for turn, seed in enumerate(seeds):
        first = turn % len(names)
        for arm in names[first:] + names[:first]:
            one = runs[arm][seed] = _train(config_file, settings[arm], seed, context)
            context.progress(
                f"seed {seed}, {arm}: {one.step_s:.2f} s a step, {one.generation_s:.2f} s of it generation, "
                f"{one.learner_s:.2f} s learner, {one.sync_s:.2f} s sync; {one.num_tokens:.0f} tokens"
            )
    figures, spread, details = compare({arm: [found[seed] for seed in seeds] for arm, found in runs.items()})
    return Result(
        name="step",
        figures=figures,
        spread=spread,
        goals={"step_speedup": (">=", 1.9), "generation_share": (">=", 0.75), "of_amdahl": (">=", 0.95)},
        environment=environment(seeds=seeds, config=load_config(config_file, settings["sync"]).model_dump(mode="json")),
        details={
            "arms": settings,
            "warmup_steps": WARMUP,
            "runs": {arm: {seed: asdict(one) for seed, one in found.items()} for arm, found in runs.items()},
            "paired": details,
            "machine": meanwhile(before),
        },
    )


def settings_of(arm: str, overrides: Sequence[str]) -> list[str]:
    """What makes the arm; the plain one stays without speculation whatever is asked for."""
    plain = arm == "plain"
    asked = [one for one in overrides if not (plain and one.startswith("speculation."))]
    dtype = f"rollout.engine.dtype={fast_precision()}"
    return [dtype, *_SETTINGS, *(() if plain else _DRAFTER), *asked, f"run.max_age={ARMS[arm]}"]


def _train(config_file: Path, settings: Sequence[str], seed: int, context: Context) -> SteppedRun:
    with TemporaryDirectory() as directory:
        own = [f"run.seed={seed}", f'run.directory="{directory}"', "run.name=run"]
        return summarise(read_run(run_session(load_config(config_file, [*settings, *own]), context)))


def summarise(found: RecordedRun) -> SteppedRun:
    """Raise PacelineError if an update is missing: a step without one is faster for nothing."""

    def mean(*keys: str) -> float:
        return float(np.nansum([found.series(key)[WARMUP:] for key in keys]) / len(found.steps[WARMUP:]))

    if len(found.steps) <= WARMUP:
        raise PacelineError(f"run.steps: got {len(found.steps)}; must be above {WARMUP} because those are not counted")
    missing = [
        step for step, count in zip(found.steps, found.series("policy/optimizer_steps"), strict=True) if not count > 0
    ]
    if missing:
        raise PacelineError(f"steps {missing} have no update, so that the arms did not do the same work")
    return SteppedRun(
        step_s=mean("time/step"),
        generation_s=mean("time/generation"),
        learner_s=mean("time/logprob", "time/train"),
        sync_s=mean("time/sync"),
        num_tokens=mean("rollout/num_tokens"),
        accepted_length=mean("rollout/accepted_length"),
    )


def amdahl(share: float, speedup: float) -> float:
    """Speed-up of the whole if this share of it becomes faster by `speedup`."""
    return 1 / ((1 - share) + share / speedup)


def compare(
    runs: Mapping[str, Sequence[SteppedRun]],
) -> tuple[dict[str, float], dict[str, float], dict[str, dict[str, Any]]]:
    """Figures, spread and `details.paired` of the arms, whose runs are in the order of their seeds."""
    measured: dict[str, list[float]] = {}
    for plain, sync, stream in zip(runs["plain"], runs["sync"], runs["stream"], strict=True):
        share, speedup = plain.generation_s / plain.step_s, plain.generation_s / sync.generation_s
        for name, value in {
            "step_speedup": plain.step_s / sync.step_s,
            "step_speedup_stream": plain.step_s / stream.step_s,
            "generation_share": share,
            "generation_speedup": speedup,
            "of_amdahl": plain.step_s / sync.step_s / amdahl(share, speedup),
            "tokens_sync": sync.num_tokens / plain.num_tokens,
            "tokens_stream": stream.num_tokens / plain.num_tokens,
        }.items():
            measured.setdefault(name, []).append(value)
    figures, spread, details = paired(measured)
    for arm, found in runs.items():
        figures[f"step_s_{arm}"], spread[f"step_s_{arm}"] = middle([one.step_s for one in found])
    return figures, spread, details
