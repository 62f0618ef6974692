"""The verdict over the runs of scripts/test-hosts.sh: each thing that must not pass is planted once."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

VERDICT = Path(__file__).resolve().parents[3] / "scripts" / "hosts-verdict.py"
STEPS = 12
Step = dict[str, Any]


def make_step(number: int, rng: np.random.Generator, *, seed: int) -> Step:
    """What TRL logs of a step, with the callback."""
    trained = {"draft/overlap": 0.1 + 0.03 * number} if number < STEPS - 2 else {}  # a drafter that holds is left alone
    judged = {"draft/published": 1.0, "draft/heldout_before": 1 + 0.1 * (number - 1), "draft/heldout_after": 1.1}
    drafts = {"rollout/accepted_length": 1 + 0.05 * number + 0.01 * rng.standard_normal()} if number > 1 else {}
    return {
        "reward": 0.5 + 0.02 * seed + 0.01 * rng.standard_normal(),
        "rewards/keep_rollouts/mean": None,
        "sampling/sampling_logp_difference/max": 0.1,
        "mismatch/max_abs": 0.12,
        "selector/steps_at_k0": 90.0,
        "selector/steps_at_k4": 10.0 + number,
        "draft/failures": 0.0,
        **trained,
        **drafts,
        **(judged if number % 4 == 1 else {}),
    }


def make_round(number: int, rng: np.random.Generator) -> Step:
    return make_step(number, rng, seed=0) | {
        "draft/policy_failures": 0.0,
        "draft/broken_lines": 0.0,
        "draft/policies_loaded": 2.0,
        "draft/scored_rollouts": 64.0,
    }


def write_runs(directory: Path, change: Callable[[str, Step], Step]) -> None:
    rng = np.random.default_rng(0)

    def write(name: str, file: str, content: object) -> None:
        path = directory / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))

    write("variable", "engine.json", {"scheduler": "AdaptiveScheduler", "counters": {"selector/verifications": 9.0}})
    for seed in range(3):
        for arm in ("plain", "callback"):
            log = [change(arm, make_step(number, rng, seed=seed)) for number in range(1, STEPS + 1)]
            write(f"{arm}-{seed}", "trainer_state.json", {"log_history": [*log, {"train_loss": 0.1}]})
    rounds = [change("sidecar", make_round(number, rng)) for number in range(1, STEPS + 1)]
    write("sidecar", "engine.json", change("engine", {"draft/version": 1.0}))
    lines = [json.dumps({"kind": "step", "step": number, "metrics": one}) for number, one in enumerate(rounds)]
    (directory / "sidecar" / "sidecar.jsonl").write_text("".join(f"{line}\n" for line in lines))
    for arm in ("plain", "accelerated"):
        found = change(
            "samples", {"high": 5, "verified": 9000.0} if arm == "accelerated" else {"high": 5, "verified": 0}
        )
        ids = rng.integers(0, found["high"], (1, 40, 3)).astype(np.int32)
        np.savez(directory / f"samples-{arm}.npz", ids=ids, verified=found["verified"])


def judge(directory: Path, change: Callable[[str, Step], Step]) -> int:
    write_runs(directory, change)
    return runpy.run_path(str(VERDICT))["main"](directory)


def test_runs_that_are_as_they_must_be_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert judge(tmp_path, lambda arm, step: step) == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("arm", "planted", "told"),
    [
        ("callback", {"rollout/accepted_length": 1.02}, "callback-0: accepted length"),
        ("callback", {"draft/published": 0.0}, "no drafter published"),
        ("callback", {"draft/restored": 1.0}, "12 failures"),
        ("callback", {"paceline/callback_failures": 1.0}, "12 failures"),
        ("callback", {"mismatch/max_abs": 0.5}, "largest raw log-ratio"),
        ("callback", {"reward": 0.2}, "rewards"),
        ("sidecar", {"draft/published": 0.0}, "sidecar"),
        ("sidecar", {"draft/failures": 1.0}, "sidecar"),
        ("sidecar", {"draft/broken_lines": 3.0}, "3 broken lines"),
        ("engine", {"draft/version": 0.0}, "version 0 in the server"),
        ("samples", {"verified": 10.0}, "10 verifications"),
    ],
)
def test_planted_trouble_fails(
    arm: str, planted: Step, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A verdict that cannot fail would let a drafter pass that was never trained."""
    assert judge(tmp_path, lambda which, step: step | planted if which == arm else step) == 1
    failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAILED")]
    assert failed and all(told in line for line in failed if arm != "callback") and told in failed[0], failed


def test_samples_of_another_distribution_fail(tmp_path: Path) -> None:
    arms = iter([5, 7])
    assert judge(tmp_path, lambda which, step: step | {"high": next(arms)} if which == "samples" else step) == 1
