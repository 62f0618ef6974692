"""`paceline bench resume`: is a run that is killed again and again the run that was never killed?

    reference ── steps 1 .. n ──▶ policy/step-1 .. n
    killed    ── step 1 ✕ resume ── step 2 ✕ resume ── … ──▶ policy/step-1 .. n, compared bit for bit

In life k the driver is killed (SIGKILL) in step k, at a stage of that step and a share of the time that the stage took
in the reference: every stage of a step is met, early and late. A resumed run that forgets the optimizer's moments is
the control: its weights must differ. The store is measured by itself (store_faults.py).
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file, save_file

from paceline.context import Context
from paceline.files import move_file
from paceline.lab.bench.store_faults import count_missed_flips, count_unreadable
from paceline.measure import Result, environment
from paceline.metrics import read_metrics
from paceline.orchestrator.store import Store
from paceline.types import PacelineError

STAGES = ("generation", "prepare", "logprob", "train", "sync", "checkpoint")
SHARES = (0.0, 0.3, 0.6, 0.9)
_SETTINGS = (
    "policy.model=arena:tiny",
    "run.sinks=[]",
    "run.checkpoint_every=2",
    "run.save_every=1",
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
)
_DEADLINE_S = 600.0


def run(*, context: Context, config_file: Path, overrides: Sequence[str] = (), num_kills: int = 24) -> Result:
    """Kill one run `num_kills` times and compare it with one that was left alone."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        settings = [str(config_file), *_SETTINGS, f"run.steps={num_kills}", f'run.directory="{root}"', *overrides]
        context.progress(f"reference: {num_kills} steps without a kill")
        _finish([*settings, "run.name=reference"], root)
        reference = root / "reference"
        kills = list(_chain(root, settings, num_kills, context))
        wrong = [step for step in range(1, num_kills + 1) if not _same(reference, root / "killed", step)]
        context.progress("control: a resumed run without the optimizer's moments")
        control_found = _control(root, num_kills)
        steps = [record["metrics"] for record in read_metrics(reference / "metrics.jsonl")["step"]]
        stall = sum(step.get("time/checkpoint", 0.0) for step in steps) / sum(step["time/step"] for step in steps)
        context.progress("killing writers of checkpoints, and flipping bits")
        unreadable = count_unreadable(root / "atomic", 200)
        naive_unreadable = count_unreadable(root / "in-place", 20, naive=True)
        missed = count_missed_flips(root / "flips", 1000)
    figures = {
        "num_kills": float(len(kills)),
        "resume_mismatches": float(len(wrong)),
        "unreadable_checkpoints": float(unreadable),
        "flips_missed": float(missed),
        "checkpoint_stall_share": stall,
        "controls_found": float(control_found) + float(naive_unreadable > 0),
    }
    return Result(
        name="resume",
        figures=figures,
        spread=dict.fromkeys(figures, 0.0),
        goals={
            "num_kills": (">=", 20.0),
            "resume_mismatches": ("<=", 0.0),
            "unreadable_checkpoints": ("<=", 0.0),
            "flips_missed": ("<=", 0.0),
            "controls_found": (">=", 2.0),
        },
        environment=environment(seeds=[0], config={"settings": list(settings[1:-1])}),
        details={"kills": kills, "steps_that_differ": wrong, "unreadable_without_a_rename": naive_unreadable},
    )


def _chain(root: Path, settings: Sequence[str], num_kills: int, context: Context) -> Iterator[dict[str, Any]]:
    """Start and resume a run, killed once in every step; yields where. The last life comes to the end."""
    times = [record["metrics"] for record in read_metrics(root / "reference" / "metrics.jsonl")["step"]]
    directory, arguments = root / "killed", [*settings, "run.name=killed"]
    for step in range(1, num_kills + 1):
        stage, share = STAGES[step % len(STAGES)], SHARES[step // len(STAGES) % len(SHARES)]
        if f"time/{stage}" not in times[step - 1]:  # a checkpoint is not due in every step
            stage = "generation"
        delay_s = share * times[step - 1][f"time/{stage}"]
        context.progress(f"kill {step}/{num_kills}: in {stage}, {delay_s:.3f} s after it began")
        driver = _start(arguments, root)
        try:
            _await_stage(driver, directory / "metrics.jsonl", step, stage, root)
            time.sleep(delay_s)  # the moment of a kill is what is chosen here
        finally:
            driver.send_signal(signal.SIGKILL)
            driver.wait()
        yield {"step": step, "stage": stage, "after_s": delay_s}
        arguments = ["--resume", str(directory)]
    _finish(arguments, root)


def _control(root: Path, num_steps: int) -> bool:
    """Forget the optimizer's moments in a checkpoint that verifies, and go on for a step: whether that is noticed."""
    directory = root / "killed"
    found, _ = Store(directory / "state").newest()
    assert found is not None and found.step == num_steps
    kept = root / "kept"
    move_file(found.path, kept)
    with Store(directory / "state").writing(found.step, found.facts) as partial:
        (partial / "learner").mkdir()
        for file in (*kept.glob("*.json"), *kept.glob("learner/*")):
            target = partial / file.relative_to(kept)
            if file.suffix == ".safetensors":
                _forget_moments(file, target)
            elif file.name != "manifest.json":
                target.write_bytes(file.read_bytes())
        (partial / "drafter").mkdir()
    longer = f"run.steps={num_steps + 1}"
    _finish(["--resume", str(directory), longer], root)
    _finish(["--resume", str(root / "reference"), longer], root)
    return not _same(root / "reference", directory, num_steps + 1)


def _forget_moments(source: Path, target: Path) -> None:
    with source.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    tensors = load_file(source)
    zeros = {name: tensor * 0 if name.startswith("exp_avg.") else tensor for name, tensor in tensors.items()}
    save_file(zeros, target, metadata=header["__metadata__"])


def _same(one: Path, other: Path, step: int) -> bool:
    files = [directory / "policy" / f"step-{step}" / "model.safetensors" for directory in (one, other)]
    first, second = (load_file(file) for file in files)
    return first.keys() == second.keys() and all(
        tensor.tobytes() == second[name].tobytes() for name, tensor in first.items()
    )


def _await_stage(driver: subprocess.Popen[bytes], metrics: Path, step: int, stage: str, root: Path) -> None:
    """Wait until this stage of this step has begun."""
    until_s = time.monotonic() + _DEADLINE_S
    while True:
        lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.is_file() else []
        records = [json.loads(line) for line in lines[-20:] if line.endswith("}")]
        if any(record["kind"] == "stage" and (record["step"], record["stage"]) == (step, stage) for record in records):
            return
        if driver.poll() is not None or time.monotonic() > until_s:
            raise PacelineError(f"the run did not come to {stage} of step {step}: {_last_lines(root)}")
        time.sleep(0.002)


def _start(arguments: Sequence[str], root: Path) -> subprocess.Popen[bytes]:
    with (root / "log").open("a") as log:
        command = [sys.executable, "-m", "paceline.cli", "train", *arguments]
        return subprocess.Popen(command, stdout=log, stderr=log)  # noqa: S603


def _finish(arguments: Sequence[str], root: Path) -> None:
    if _start(arguments, root).wait():
        raise PacelineError(f"a run failed: {_last_lines(root)}")


def _last_lines(root: Path) -> str:
    return (root / "log").read_text(encoding="utf-8")[-2000:]
