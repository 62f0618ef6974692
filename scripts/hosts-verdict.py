"""What the runs of scripts/test-hosts.sh show: exits with 1 if one of them is not as it must be.

python scripts/hosts-verdict.py DIR
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np

from paceline.certify.lossless import FALSE_POSITIVE_RATE, two_sample

FAILURES = ("draft/failures", "draft/hand_over_failures", "draft/restored", "draft/restore_failures")
FEWEST_VERIFIED = 1000


def log_of(run: Path) -> list[dict[str, Any]]:
    history = json.loads((run / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    return [step for step in history if "reward" in step]


def late(run: Path, key: str) -> float:
    """Mean over the last third of a run."""
    log = log_of(run)
    return mean(step[key] for step in log[-len(log) // 3 :] if key in step)


def findings(directory: Path) -> Iterator[tuple[str, bool]]:
    """Each finding, and whether it is as it must be."""
    engine = json.loads((directory / "variable" / "engine.json").read_text(encoding="utf-8"))
    verified = engine["counters"].get("selector/verifications", 0)
    yield (
        f"variable alone: {engine['scheduler']}, {verified:.0f} verifications",
        engine["scheduler"] == "AdaptiveScheduler" and verified > 0,
    )
    plain, trained = (sorted(directory.glob(f"{name}-*")) for name in ("plain", "callback"))
    for run in trained:
        log = log_of(run)
        lengths = [step.get("rollout/accepted_length", 1.0) for step in log]
        start, end = mean(lengths[:5]), late(run, "rollout/accepted_length")
        drafting = [1 - step["selector/steps_at_k0"] / num_steps(step) for step in (log[0], log[-1])]
        failed = sum(step.get(key, 0.0) for step in log for key in FAILURES)
        yield (
            f"{run.name}: accepted length {start:.2f} -> {end:.2f}, steps with drafts {drafting[0]:.0%} -> "
            f"{drafting[1]:.0%}, overlap {log[0]['draft/overlap']:.2f} -> {late(run, 'draft/overlap'):.2f}, "
            f"{log[-1]['draft/published_round']:.0f} published, {failed:.0f} failures",
            end > start + 0.2 and failed == 0,
        )
        gap = max(step["mismatch/max_abs"] for step in log)
        yield f"{run.name}: largest raw log-ratio {gap:.3f}", gap < 0.5
    rewards = [late(run, "reward") for run in plain]
    found, spread = mean(late(run, "reward") for run in trained), stdev(rewards)
    yield (
        f"rewards: plain {', '.join(f'{value:.3f}' for value in rewards)}; with the callback {found:.3f}",
        min(rewards) - spread <= found <= max(rewards) + spread,
    )
    arms = [np.load(directory / f"samples-{name}.npz") for name in ("plain", "accelerated")]
    outcome = two_sample(*(list(arm["ids"]) for arm in arms))
    verified = float(arms[1]["verified"])
    yield (
        f"two-sample test: p = {outcome.p_value:.4f}, {outcome.num_samples} samples, {verified:.0f} verifications",
        outcome.p_value >= FALSE_POSITIVE_RATE and verified >= FEWEST_VERIFIED,
    )


def num_steps(step: dict[str, Any]) -> float:
    """Steps of the engine."""
    return sum(value for key, value in step.items() if key.startswith("selector/steps_at_k"))


def main(directory: Path) -> int:
    failed = False
    for text, fine in findings(directory):
        sys.stdout.write(f"{'ok    ' if fine else 'FAILED'} {text}\n")
        failed = failed or not fine
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
