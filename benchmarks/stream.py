"""Does asynchronous training learn as much as synchronous training, with busy engines?

    sync      run.max_age=0: engines wait while the learner works
    stream    run.max_age=2: the learner takes groups as they finish, and engines go on

Both arms are the arena with one engine on one core and the learner on the other, both corrected by token-tis, with the
same number of updates, of rollouts in each and of held-out prompts; they differ in `max_age` only, and take turns.

    stream_within_spread   1 if |mean final accuracy of stream - that of sync| <= largest - smallest final accuracy of
                           the sync seeds; the final accuracy is the held-out one after the last step
    idle_over_sync         idle engine-seconds of all stream runs over those of all sync runs. An engine is idle while
                           it has no rollout, and during a weight sync, which pauses it; a run counts from the start of
                           its first rollout to the end of its last, without evaluations
    max_age_exceeded       rollouts that were trained on with a token older than `max_age`, in all runs
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from paceline.config import load_config
from paceline.context import Context
from paceline.measure import CpuTimes, Result, environment, paired
from paceline.metrics import read_metrics
from paceline.report.recorded import Interval, RecordedRun, read_run
from paceline.report.summary import seconds, subtract, union
from paceline.sessions.train import run as run_session

ARMS: Mapping[str, tuple[str, ...]] = {"sync": ("run.max_age=0",), "stream": ("run.max_age=2",)}
_SETTINGS = (
    "run.steps=16",
    "run.checkpoint_every=0",
    "run.sinks=[]",
    "rollout.num_engines=1",
    "rollout.prompts_per_step=8",
    "learner.cpus=1",
    "correction.kind=token-tis",
    "eval.every=1000",
    "eval.num_prompts=256",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedRun:
    """What one run came to."""

    first: float
    """Held-out accuracy before the first step..."""
    final: float
    """...and after the last."""
    idle_s: float
    engine_s: float
    """Engine-seconds of which `idle_s` are a part."""
    num_too_old: int
    age_mean: float
    step_s: float


def run(
    *, context: Context, config_file: Path, overrides: Sequence[str] = (), seeds: Sequence[int] = (0, 1, 2)
) -> Result:
    """Train both arms once per seed, by turns."""
    before = CpuTimes.now()
    settings = {arm: [*_SETTINGS, *overrides, *changed] for arm, changed in ARMS.items()}
    runs: dict[str, dict[int, StreamedRun]] = {arm: {} for arm in ARMS}
    for seed in seeds:
        for arm, arm_settings in settings.items():
            one = runs[arm][seed] = _train(config_file, arm_settings, seed, context)
            context.progress(
                f"seed {seed}, {arm}: accuracy {one.first:.3f} -> {one.final:.3f}, engine idle for "
                f"{one.idle_s / one.engine_s:.0%}, {one.step_s:.1f} s a step, mean age {one.age_mean:.2f}"
            )
    figures, spread, pairs = compare({arm: list(found.values()) for arm, found in runs.items()})
    return Result(
        name="stream",
        figures=figures,
        spread=spread,
        goals={
            "stream_within_spread": (">=", 1.0),
            "idle_over_sync": ("<=", 0.3),
            "max_age_exceeded": ("<=", 0.0),
        },
        environment=environment(
            seeds=seeds, config=load_config(config_file, settings["stream"]).model_dump(mode="json")
        ),
        details={
            "arms": settings,
            "paired": pairs,
            "runs": {arm: {seed: asdict(one) for seed, one in found.items()} for arm, found in runs.items()},
            "steal_share": CpuTimes.now().steal_share_since(before),
        },
    )


def _train(config_file: Path, settings: Sequence[str], seed: int, context: Context) -> StreamedRun:
    with TemporaryDirectory() as directory:
        own = [f"run.seed={seed}", f'run.directory="{directory}"', "run.name=run"]
        directory_of_run = run_session(load_config(config_file, [*settings, *own]), context)
        found, stages = read_run(directory_of_run), read_metrics(directory_of_run / "metrics.jsonl")["stage"]
    idle_s, engine_s = idle_time(found, sync_intervals(stages))
    tokens = found.series("rollout/num_tokens")
    return StreamedRun(
        first=found.evals[0][1],
        final=found.evals[-1][1],
        idle_s=idle_s,
        engine_s=engine_s,
        num_too_old=int(found.series("rollout/max_age_exceeded").sum()),
        age_mean=float((found.series("rollout/age_mean") * tokens).sum() / tokens.sum()),
        step_s=float(found.series("time/step").mean()),
    )


def sync_intervals(stages: Sequence[Mapping[str, Any]]) -> list[Interval]:
    """When the policy was pushed: a stage lasts until the next begins."""
    pairs = zip(stages, [*stages[1:], {"time_s": math.inf}], strict=True)
    return [(stage["time_s"], after["time_s"]) for stage, after in pairs if stage["stage"] == "sync"]


def idle_time(found: RecordedRun, syncs: Sequence[Interval]) -> tuple[float, float]:
    """Engine-seconds without a rollout in flight or within a sync, and all of them, from the first rollout to the
    last."""
    begin_s = min(batch.window[0] for batch in found.rollouts)
    end_s = max(batch.window[1] for batch in found.rollouts)
    counted = subtract([(begin_s, end_s)], found.eval_intervals)
    idle_s = engine_s = 0.0
    for engine in sorted({name for batch in found.rollouts for name in batch.engines}):
        busy = union(
            (float(start_s), float(end_s))
            for batch in found.rollouts
            if engine in batch.engines
            for number, start_s, end_s in zip(batch.engine, batch.start_s, batch.end_s, strict=True)
            if batch.engines[number] == engine
        )
        idle_s += seconds(subtract(counted, subtract(busy, syncs)))
        engine_s += seconds(counted)
    return idle_s, engine_s


def compare(
    runs: Mapping[str, Sequence[StreamedRun]],
) -> tuple[dict[str, float], dict[str, float], dict[str, dict[str, Any]]]:
    """Figures and spread of the arms (range over seeds) and of their ratio by seed, and `details.paired`."""
    figures: dict[str, float] = {}
    spread: dict[str, float] = {}
    for arm, found in runs.items():
        for name, values in (
            ("accuracy", [one.final for one in found]),
            ("gain", [100 * (one.final - one.first) for one in found]),
            ("idle_share", [one.idle_s / one.engine_s for one in found]),
            ("age_mean", [one.age_mean for one in found]),
            ("step_s", [one.step_s for one in found]),
        ):
            figures[f"{name}_{arm}"] = sum(values) / len(values)
            spread[f"{name}_{arm}"] = max(values) - min(values)
    difference = abs(figures["accuracy_stream"] - figures["accuracy_sync"])
    idle_s = {arm: [one.idle_s for one in found] for arm, found in runs.items()}
    ratios = [stream_s / sync_s for stream_s, sync_s in zip(idle_s["stream"], idle_s["sync"], strict=True)]
    figures["stream_within_spread"] = float(difference <= spread["accuracy_sync"])
    figures["idle_over_sync"] = sum(idle_s["stream"]) / sum(idle_s["sync"])
    figures["max_age_exceeded"] = float(sum(one.num_too_old for found in runs.values() for one in found))
    _, interval, pairs = paired({"idle_over_sync": ratios})
    return figures, spread | interval | {"stream_within_spread": 0.0, "max_age_exceeded": 0.0}, pairs
