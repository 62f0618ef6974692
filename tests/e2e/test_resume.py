"""A run of real engines that is ended twice, by SIGTERM and by SIGKILL, ends with the weights of one that was not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from safetensors.torch import load_file

from paceline.metrics import read_metrics

SETTINGS = [
    "configs/arena.toml",
    "policy.model=arena:tiny",
    "run.steps=4",
    "run.checkpoint_every=2",
    "run.sinks=[]",
    "rollout.num_engines=1",
    "rollout.prompts_per_step=4",
    "rollout.group_size=4",
    "rollout.max_tokens=96",
    "rollout.engine.dtype=float32",
    "rollout.engine.deterministic=true",
    "rollout.engine.max_model_len=256",
    "rollout.engine.kv_cache_gb=0.25",
    "learner.learning_rate=1e-3",
    "learner.cpus=1",
    "eval.every=0",
]


def start(log: Path, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "paceline.cli", "train", *arguments]
    with log.open("a") as lines:
        return subprocess.Popen(command, stdout=lines, stderr=lines, cwd=Path(__file__).parents[2])


def finish(driver: subprocess.Popen[bytes], log: Path) -> None:
    try:
        assert driver.wait(timeout=900) == 0, log.read_text()[-3000:]
    finally:
        driver.kill()


def end_when(driver: subprocess.Popen[bytes], condition: Callable[[], bool], blow: signal.Signals, log: Path) -> int:
    """Send the signal once the condition holds; returns the exit code. After 10 s no process of the run may be left."""
    deadline = time.monotonic() + 900
    try:
        while not condition():
            assert driver.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.01)
        family = psutil.Process(driver.pid).children(recursive=True)
        assert any("EngineActor" in " ".join(process.cmdline()) for process in family), family
        os.kill(driver.pid, blow)
        left = psutil.wait_procs(family, timeout=10)[1]
        assert [process for process in left if process.status() != psutil.STATUS_ZOMBIE] == []
        return driver.wait(timeout=300)
    finally:
        driver.kill()


def end_twice(run: Path, log: Path) -> None:
    """Make the run with two interruptions."""

    def logged(step: int, num_groups: int) -> Callable[[], bool]:
        names = [f"group-{position:08d}.safetensors" for position in range(4 * step - 4, 4 * step)]
        return lambda: sum(len(list((run / "batches").glob(name))) for name in names) >= num_groups

    driver = start(log, *SETTINGS, f'run.directory="{run.parent}"', f"run.name={run.name}")
    assert end_when(driver, logged(1, 2), signal.SIGTERM, log) == 75
    told = log.read_text()
    assert f"paceline train --resume {run}" in told and "Traceback" not in told
    driver = start(log, "--resume", str(run))
    assert end_when(driver, logged(3, 1), signal.SIGKILL, log) == -signal.SIGKILL
    finish(start(log, "--resume", str(run)), log)


def test_a_run_ended_twice_ends_with_the_weights_of_one_that_was_not(tmp_path):
    """Guards against seeds that depend on what happened before, rollouts that are sampled or learned from twice,
    optimizer state and counters that start anew, and prompts that are skipped."""
    whole, run = tmp_path / "whole", tmp_path / "run"
    reference_log = tmp_path / "reference.log"
    reference = start(reference_log, *SETTINGS, f'run.directory="{tmp_path}"', "run.name=whole")
    try:
        end_twice(run, tmp_path / "log")
    finally:
        finish(reference, reference_log)

    expected = load_file(whole / "policy" / "step-4" / "model.safetensors")
    resumed = load_file(run / "policy" / "step-4" / "model.safetensors")
    assert expected.keys() == resumed.keys()
    for name, tensor in expected.items():
        assert tensor.numpy().tobytes() == resumed[name].numpy().tobytes(), name
    records = {directory: read_metrics(directory / "metrics.jsonl") for directory in (whole, run)}
    for found in records.values():
        assert [record["step"] for record in found["step"]] == [1, 2, 3, 4]
        assert found["step"][-1]["metrics"]["sync/version"] >= 3, "too little was learned for equal weights to say much"
    for key in ("length", "reward"):
        columns = [[record[key] for record in found["rollouts"]] for found in records.values()]
        assert columns[0] == columns[1]
    assert len(records[run]["run"]) == 3
    state = sorted(entry.name for entry in (run / "state").iterdir())
    assert state == ["step-00000002", "step-00000004"]
    # A rollout of step 3 came from the policy of the checkpoint before it.
    words = ["replay", str(run), "speculation.drafter.kind=ngram", "--rollout", "8.0/train:1"]
    again = subprocess.run([sys.executable, "-m", "paceline.cli", *words], check=False, capture_output=True, text=True)
    assert again.returncode == 0, again.stdout + again.stderr
    assert again.stdout.count("EQUAL") == 2
