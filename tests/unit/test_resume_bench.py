"""The comparison behind `python -m benchmarks resume`: blind for nothing but times."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from benchmarks.run_traces import differences, keep_checkpoints, trace
from paceline.metrics import JsonlSink, Recorder
from paceline.orchestrator.store import Store

CONTENT = {
    "weights": b"weights",
    "tokens": "tokens",
    "optimizer": b"moments",
    "counters": 3,
    "position": 8,
    "drafter": b"base",
    "drafter's counters": 77,
    "rounds": 2,
}


def tensors(value: bytes) -> bytes:
    return save({"weight": np.frombuffer(value, np.uint8)})


def leave(run: Path, content: dict, *, time_s: float):
    """Write what a run of two steps leaves behind, and return its trace."""
    run.mkdir()
    recorder = Recorder(JsonlSink(run / "metrics.jsonl"))
    for step in (1, 2):
        recorder.write(
            "rollouts", {"step": step, "sha256": content["tokens"] if step == 2 else "", "start_s": [time_s]}
        )
        policy = run / "policy" / f"step-{step}"
        policy.mkdir(parents=True)
        (policy / "model.safetensors").write_bytes(tensors(content["weights"] if step == 2 else b"first"))
    recorder.close()
    with Store(run / "state").writing(2, {}) as partial:
        (partial / "learner").mkdir()
        (partial / "learner" / "shard-0.safetensors").write_bytes(tensors(content["optimizer"]))
        (partial / "learner" / "counters.json").write_text(json.dumps({"num_updates": content["counters"]}))
        (partial / "drafter").mkdir()
        (partial / "drafter" / "base-00000002.safetensors").write_bytes(tensors(content["drafter"]))
        progress = {"seal": f"of {time_s}", "training_s": time_s, "num_tokens": content["drafter's counters"]}
        (partial / "drafter" / "progress-engine-0.json").write_text(json.dumps(progress))
        drafter = {"judged": content["rounds"], "drift": {"generation_s": time_s}, "update_cost_s": time_s}
        tree = {"step": 2, "version": 2, "elapsed_s": time_s, "intake": {"num_taken": content["position"]}}
        (partial / "run.json").write_text(json.dumps(tree | {"drafter": drafter}))
    kept = run.parent / f"{run.name}-kept"
    keep_checkpoints(run, kept)
    return trace(run, kept)


@pytest.mark.parametrize("changed", CONTENT)
def test_what_differs_is_found(tmp_path: Path, changed: str) -> None:
    other = CONTENT | {changed: CONTENT[changed] + type(CONTENT[changed])(1)}
    found = differences(
        leave(tmp_path / "one", CONTENT, time_s=1.0), leave(tmp_path / "other", other, time_s=1.0), step=2
    )
    part = {"position": "counters", "drafter's counters": "drafter", "rounds": "drafter"}.get(changed, changed)
    assert found == [f"step 2: {part}"]


def test_times_do_not_count_and_what_is_missing_does(tmp_path: Path) -> None:
    one, other = leave(tmp_path / "one", CONTENT, time_s=1.0), leave(tmp_path / "other", CONTENT, time_s=2.0)
    assert differences(one, other) == []
    shorter = {key: value for key, value in other.items() if key != (1, "tokens")}
    assert differences(one, shorter) == differences(shorter, one) == ["step 1: tokens"]
