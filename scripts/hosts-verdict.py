"""What the runs of scripts/test-hosts.sh show: exits with 1 if one of them is not as it must be.

python scripts/hosts-verdict.py DIR

Most limits come from the runs' own noise. Those that are guesses, to be set by the first runs, are named `GUESSED_`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from math import sqrt
from pathlib import Path
from statistics import mean, stdev, variance
from typing import Any

import numpy as np

from paceline.certify.lossless import FALSE_POSITIVE_RATE, two_sample
from paceline.metrics import read_metrics

FAILURES = (
    "draft/failures",
    "draft/hand_over_failures",
    "draft/restored",
    "draft/restore_failures",
    "selector/failures",
    "paceline/callback_failures",
)
FEWEST_VERIFIED = 5000
"""A draft of 4 tokens at every step: at least every fifth token of the samples, which are some 70,000 at most."""
GUESSED_GAP = 2.0
"""Largest raw log-ratio of a run with the callback, over that of the plain runs: both are of rounding in bfloat16."""
GUESSED_REWARD = 1.0
"""Deviations of the plain runs' rewards by which the others may be outside of their range."""

Log = Sequence[dict[str, Any]]


def log_of(run: Path) -> Log:
    history = json.loads((run / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    return [step for step in history if "reward" in step]


def values(log: Log, key: str) -> list[float]:
    """Values of the steps that have one: without drafts there is no accepted length, without training no overlap."""
    return [step[key] for step in log if step.get(key) is not None]


def thirds(found: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    """Return the first and the last third of a run's values, at least two values each."""
    num = max(2, len(found) // 3)
    return found[:num], found[-num:]


def rise(found: Sequence[float]) -> tuple[str, bool]:
    """How a figure went from the first third of a run to the last, and whether it rose by more than its noise: two
    standard errors of the difference."""
    if len(found) < 4:
        return f"only {len(found)} values", False
    early, late = thirds(found)
    noise = 2 * sqrt(variance(early) / len(early) + variance(late) / len(late))
    text = f"{mean(early):.3f} -> {mean(late):.3f} (noise {noise:.3f})"
    return text, mean(late) - mean(early) > noise


def heldout(log: Log) -> tuple[str, bool]:
    """Compare held-out accepted lengths of the first drafter and the last published one."""
    before, published = values(log, "draft/heldout_before"), [step for step in log if step.get("draft/published")]
    if not published:
        return f"no drafter published in {len(before)} rounds", False
    after = published[-1]["draft/heldout_after"]
    return f"{len(published)} drafters published, held out {before[0]:.3f} -> {after:.3f}", after > before[0]


def variable_alone(directory: Path) -> Iterator[tuple[str, bool]]:
    engine = json.loads((directory / "variable" / "engine.json").read_text(encoding="utf-8"))
    verified = engine["counters"].get("selector/verifications", 0)
    yield (
        f"variable alone: {engine['scheduler']}, {verified:.0f} verifications",
        engine["scheduler"] == "AdaptiveScheduler" and verified > 0,
    )


def callbacks(plain: Sequence[Path], trained: Sequence[Path]) -> Iterator[tuple[str, bool]]:
    rounding = max(max(values(log_of(run), "sampling/sampling_logp_difference/max")) for run in plain)
    for run in trained:
        log = log_of(run)
        lengths, longer = rise(values(log, "rollout/accepted_length"))
        told, better = heldout(log)
        failed = sum(sum(values(log, key)) for key in FAILURES)
        overlap = values(log, "draft/overlap")
        yield (
            f"{run.name}: accepted length {lengths}, {told}, overlap {shown(overlap[:1])} -> {shown(overlap[-1:])}, "
            f"steps with drafts {drafting(log[0]):.0%} -> {drafting(log[-1]):.0%}, {failed:.0f} failures",
            longer and better and not failed,
        )
        gap = max(values(log, "mismatch/max_abs"))
        yield f"{run.name}: largest raw log-ratio {gap:.3f}, plain {rounding:.3f}", gap <= GUESSED_GAP * rounding
    rewards, found = ([mean(thirds(values(log_of(run), "reward"))[1]) for run in runs] for runs in (plain, trained))
    # One seed alone says nothing of the spread between seeds: that between steps is wider.
    spread = GUESSED_REWARD * stdev(rewards if len(rewards) > 1 else values(log_of(plain[0]), "reward"))
    yield (
        f"rewards: plain {shown(rewards)}; with the callback {shown(found)}",
        min(rewards) - spread <= mean(found) <= max(rewards) + spread,
    )


def sidecar(run: Path) -> Iterator[tuple[str, bool]]:
    """Stock TRL in server mode without a callback, and a sidecar beside it."""
    rounds = [record["metrics"] for record in read_metrics(run / "sidecar.jsonl")["step"]]
    engine = json.loads((run / "engine.json").read_text(encoding="utf-8"))
    lengths, _ = rise(values(rounds, "rollout/accepted_length"))  # a slow machine trains little in so few steps
    told, better = heldout(rounds)
    last = rounds[-1]
    failed = sum(sum(values(rounds, key)) for key in FAILURES) + last["draft/policy_failures"]
    yield (
        f"sidecar: accepted length {lengths}, {told}, version {engine['draft/version']:.0f} in the server, "
        f"{sum(values(rounds, 'draft/scored_rollouts')):.0f} rollouts scored with {last['draft/policies_loaded']:.0f} "
        f"policies, {last['draft/broken_lines']:.0f} broken lines, {failed:.0f} failures",
        better and engine["draft/version"] >= 1 and not failed and not last["draft/broken_lines"],
    )


def samples(directory: Path) -> Iterator[tuple[str, bool]]:
    arms = [np.load(directory / f"samples-{name}.npz") for name in ("plain", "accelerated")]
    outcome = two_sample(*(list(arm["ids"]) for arm in arms))
    verified = float(arms[1]["verified"])
    yield (
        f"two-sample test: p = {outcome.p_value:.4f}, {outcome.num_samples} samples, {verified:.0f} verifications",
        outcome.p_value >= FALSE_POSITIVE_RATE and verified >= FEWEST_VERIFIED,
    )


def findings(directory: Path) -> Iterator[tuple[str, bool]]:
    """Each finding, and whether it is as it must be."""
    yield from variable_alone(directory)
    plain, trained = (sorted(directory.glob(f"{name}-*")) for name in ("plain", "callback"))
    yield from callbacks(plain, trained)
    yield from sidecar(directory / "sidecar")
    yield from samples(directory)


def drafting(step: dict[str, Any]) -> float:
    """Share of the engine's steps that had drafts."""
    steps = {key: value for key, value in step.items() if key.startswith("selector/steps_at_k")}
    return 1 - steps["selector/steps_at_k0"] / sum(steps.values()) if sum(steps.values()) else 0.0


def shown(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:.3f}" for number in numbers)


def main(directory: Path) -> int:
    failed = False
    for text, fine in findings(directory):
        sys.stdout.write(f"{'ok    ' if fine else 'FAILED'} {text}\n")
        failed = failed or not fine
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
