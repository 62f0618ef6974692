"""Held-out accuracy by RL on the arena: by itself, with FP8 rollouts, and with asynchronous training.

learning     the arena's config. `gain_min`, `gain_mean`: last minus first held-out accuracy, in points, over the seeds

correction   bf16      rollouts in BF16, no correction
             fp8       FP8 weights and KV cache, no correction
             fp8_tis   the same with token-tis, C = 2
             fp8_mis   the same with token-mis
             The guard only observes. `correction_within_spread` is 1 if the mean final accuracy of both corrected arms
             is not lower than that of BF16 by more than the range of the BF16 seeds.

stream       sync      run.max_age=0: engines wait while the learner works
             stream    run.max_age=2: the learner takes groups as they finish, and engines continue
             One engine on one core, the learner on the other, both arms corrected by token-tis.
             `stream_within_spread` is 1 if the mean final accuracies differ by no more than the range of the sync
             seeds. `idle_over_sync` is idle engine-seconds, stream over sync: an engine is idle without a rollout and
             during a weight sync. `max_age_exceeded` counts rollouts with a token older than `max_age`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import ARENA, Record, by_seed, resolved, train_by_turns
from paceline.context import Context
from paceline.metrics import read_metrics
from paceline.report.recorded import Interval, RecordedRun
from paceline.report.summary import seconds, subtract, union

SEEDS = (0, 1, 2)
_FP8 = ("rollout.engine.weights=fp8", "rollout.engine.kv_cache=fp8")
PRECISIONS: Mapping[str, tuple[str, ...]] = {
    "bf16": (),
    "fp8": _FP8,
    "fp8_tis": (*_FP8, "correction.kind=token-tis"),
    "fp8_mis": (*_FP8, "correction.kind=token-mis"),
}
_STREAM = (
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
class Training:
    """Result of one run."""

    curve: Sequence[tuple[int, float]]
    """Step and held-out accuracy."""
    step_s: float
    k3: float
    """Median mismatch of a step."""
    idle_s: float
    engine_s: float
    """Engine-seconds, of which `idle_s` are idle."""
    num_too_old: int
    age_mean: float

    @property
    def final(self) -> float:
        return self.curve[-1][1]

    @property
    def gain(self) -> float:
        """Last minus first held-out accuracy, in points."""
        return 100 * (self.curve[-1][1] - self.curve[0][1])

    def __str__(self) -> str:
        idle = self.idle_s / self.engine_s
        return f"accuracy {self.curve[0][1]:.3f} -> {self.final:.3f}, k3 {self.k3:.1e}, engines idle for {idle:.0%}"


def run(overrides: Sequence[str], context: Context) -> Record:
    record, found = _train({"rl": overrides}, context)
    gains = [training.gain for training in found["rl"]]
    record.goals = {"gain_min": (">=", 10.0), "steps": ("<=", 40.0)}
    record.mean("gain_mean", gains)
    record.add("gain_min", min(gains), max(gains) - min(gains))
    record.add("steps", record.config["run"]["steps"])
    return record


def correction(overrides: Sequence[str], context: Context) -> Record:
    arms = {arm: ["guard.mode=observe", *overrides, *settings] for arm, settings in PRECISIONS.items()}
    record, found = _train(arms, context)
    record.goals = {"correction_within_spread": (">=", 1.0)}
    compare_precisions(record, found)
    return record


def stream(overrides: Sequence[str], context: Context) -> Record:
    arms = {arm: [*_STREAM, *overrides, f"run.max_age={age}"] for arm, age in (("stream", 2), ("sync", 0))}
    record, found = _train(arms, context)
    record.goals = {"stream_within_spread": (">=", 1.0), "idle_over_sync": ("<=", 0.3), "max_age_exceeded": ("<=", 0.0)}
    compare_streams(record, found)
    return record


def _train(arms: Mapping[str, Sequence[str]], context: Context) -> tuple[Record, dict[str, list[Training]]]:
    """Train the arms; the record has the first one's config."""
    found = train_by_turns(arms, SEEDS, context, summarize)
    details = {"arms": dict(arms), "runs": by_seed(found, SEEDS)}
    return Record(seeds=SEEDS, config=resolved(ARENA, next(iter(arms.values()))), details=details), found


def _compare(record: Record, found: Mapping[str, Sequence[Training]]) -> None:
    for arm, runs in found.items():
        record.mean(f"accuracy_{arm}", [training.final for training in runs])
        record.mean(f"gain_{arm}", [training.gain for training in runs])
        record.mean(f"k3_{arm}", [training.k3 for training in runs])
        record.mean(f"seconds_per_step_{arm}", [training.step_s for training in runs])
        record.mean(f"idle_share_{arm}", [training.idle_s / training.engine_s for training in runs])
        record.mean(f"age_mean_{arm}", [training.age_mean for training in runs])


def compare_precisions(record: Record, found: Mapping[str, Sequence[Training]]) -> None:
    _compare(record, found)
    least = record.figures["accuracy_bf16"] - record.spread["accuracy_bf16"]
    within = all(record.figures[f"accuracy_{arm}"] >= least for arm in ("fp8_tis", "fp8_mis"))
    record.add("correction_within_spread", within)


def compare_streams(record: Record, found: Mapping[str, Sequence[Training]]) -> None:
    _compare(record, found)
    idle_s = {arm: [training.idle_s for training in runs] for arm, runs in found.items()}
    record.ratios({"idle_over_sync": [a / b for a, b in zip(idle_s["stream"], idle_s["sync"], strict=True)]})
    record.figures["idle_over_sync"] = sum(idle_s["stream"]) / sum(idle_s["sync"])
    difference = abs(record.figures["accuracy_stream"] - record.figures["accuracy_sync"])
    record.add("stream_within_spread", difference <= record.spread["accuracy_sync"])
    record.add("max_age_exceeded", sum(training.num_too_old for runs in found.values() for training in runs))


def summarize(found: RecordedRun, directory: Path) -> Training:
    tokens = found.series("rollout/num_tokens")
    idle_s, engine_s = idle_time(found, sync_intervals(read_metrics(directory / "metrics.jsonl")["stage"]))
    return Training(
        curve=found.evals,
        step_s=float(found.series("time/step").mean()),
        k3=float(np.nanmedian(found.series("mismatch/k3"))),
        idle_s=idle_s,
        engine_s=engine_s,
        num_too_old=int(np.nansum(found.series("rollout/max_age_exceeded"))),
        age_mean=float(np.nansum(found.series("rollout/age_mean") * tokens) / tokens.sum()),
    )


def sync_intervals(stages: Sequence[Mapping[str, Any]]) -> list[Interval]:
    """Return the intervals of policy pushes: a stage lasts until the next begins."""
    pairs = zip(stages, [*stages[1:], {"time_s": math.inf}], strict=True)
    return [(stage["time_s"], after["time_s"]) for stage, after in pairs if stage["stage"] == "sync"]


def idle_time(found: RecordedRun, syncs: Sequence[Interval]) -> tuple[float, float]:
    """Return idle engine-seconds and all of them, from the first rollout to the last, without evaluations."""
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
