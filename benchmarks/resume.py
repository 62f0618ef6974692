"""Is a run that is killed again and again the run that was never killed?

    reference ── steps 1 .. n ─────────────────────────────────▶ weights, tokens, optimizer, counters, drafter
    killed    ── step 1 ✕ resume ── step 2 ✕ resume ── … ──────▶ the same, compared bit for bit (run_traces.py)
    controls  ── a checkpoint of the reference without one part, resumed for one step: it must differ

In life k the driver is killed (SIGKILL) in step k, at a stage of that step and a share of the time that the stage took
in the reference: every stage of a step is met, early and late. The run trains a drafter and speculates with it. All is
deterministic: an engine has one request at a time, drafts are greedy and of one length, slices of drafter training are
counted, and its buffer holds the rollouts of one policy version. The store is measured by itself (store_faults.py).

    checkpoint_stall_share = time/checkpoint / (run.checkpoint_every x time/step)

with the medians of the reference's steps and the default of `run.checkpoint_every`.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from benchmarks.run_traces import Trace, checkpoints_in, differences, keep_checkpoints, trace
from benchmarks.store_faults import count_missed_flips, count_unreadable
from paceline.arena.task import problems
from paceline.config import RunConfig
from paceline.context import Context
from paceline.measure import Result, environment
from paceline.metrics import read_metrics
from paceline.orchestrator.batch_log import BatchLog, Taken
from paceline.orchestrator.store import Store, verify
from paceline.types import PacelineError

STAGES = ("generation", "prepare", "logprob", "train", "draft", "sync", "checkpoint")
SHARES = (0.0, 0.4, 0.8)
_SETTINGS = (
    "policy.model=arena:tiny",
    "run.sinks=[]",
    "run.checkpoint_every=2",
    "run.save_every=1",
    "rollout.num_engines=1",
    "rollout.prompts_per_step=4",
    "rollout.group_size=4",
    "rollout.max_tokens=32",
    "rollout.engine.dtype=float32",
    "rollout.engine.deterministic=true",
    "rollout.engine.max_model_len=256",
    "rollout.engine.kv_cache_gb=0.25",
    "learner.learning_rate=1e-4",
    "learner.cpus=1",
    "eval.every=0",
    "eval.num_prompts=1",
    "speculation.drafter.kind=eagle3",
    "speculation.drafter.path=arena:tiny/eagle3",
    "speculation.drafter.draft_sampling=greedy",
    "speculation.max_draft_length=3",
    "speculation.selector.kind=fixed",
    "speculation.selector.draft_length=3",
    "speculation.training.mode=inline",
    "speculation.training.when=always",
    "speculation.training.inline_slices=2",
    "speculation.training.tokens_per_step=256",
    "speculation.training.round_tokens=128",
    "speculation.training.buffer.keep_versions=1",
    "speculation.training.buffer.heldout_share=0.5",
)
_DEADLINE_S = 1800.0
_LOOK_S = 0.005
_TAIL_BYTES = 20_000
"""More than a step writes of anything but its rollouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrivenRun:
    """One run, its checkpoints of all steps, and the log of its drivers."""

    run: Path

    @property
    def kept(self) -> Path:
        return self.run.parent / f"{self.run.name}-checkpoints"

    @property
    def log(self) -> Path:
        return self.run.parent / f"{self.run.name}.log"

    def trace(self) -> Trace:
        return trace(self.run, self.kept)

    def engines_lost(self) -> list[str]:
        """Engines that were lost in steps that count: nobody kills any here, and one that joins in the middle of a step
        drafts with the first drafter until the next sync, so that it samples other tokens."""
        events = read_metrics(self.run / "metrics.jsonl").get("event", [])
        return [f"step {event['step']}: {event['why']}" for event in events if event["what"] == "engine_lost"]

    def start(self, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        with self.log.open("a") as log:
            command = [sys.executable, "-m", "paceline.cli", "train", *arguments]
            return subprocess.Popen(command, stdout=log, stderr=log)  # noqa: S603

    def drive(self, arguments: Sequence[str], until: Callable[[], bool] = lambda: False, delay_s: float = 0.0) -> None:
        """Let a driver come to its end, or kill it so many seconds after `until` holds."""
        driver, until_s = self.start(arguments), time.monotonic() + _DEADLINE_S
        try:
            while not until():
                if (code := driver.poll()) == 0:
                    break
                if code is not None or time.monotonic() > until_s:
                    lines = self.log.read_text(encoding="utf-8")[-2000:]
                    raise PacelineError(f"{self.run.name}: the driver ended with {code}, or too late: {lines}")
                keep_checkpoints(self.run, self.kept)
                time.sleep(_LOOK_S)
            else:
                time.sleep(delay_s)  # the moment of a kill is what is chosen here
        finally:
            driver.send_signal(signal.SIGKILL)
            driver.wait()
        keep_checkpoints(self.run, self.kept)


def run(*, context: Context, config_file: Path, overrides: Sequence[str] = (), num_kills: int = 20) -> Result:
    """Kill one run `num_kills` times, an even number, and compare it with one that was left alone."""
    assert num_kills % 2 == 0, "the last step but one must have a checkpoint, for the controls"
    chosen, num_steps = [*_SETTINGS, *overrides], num_kills + 1
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        reference, killed = DrivenRun(run=root / "reference"), DrivenRun(run=root / "killed")
        settings = [str(config_file), *chosen, _data(root), f"run.steps={num_steps}", f'run.directory="{root}"']
        context.progress(f"reference: {num_steps} steps without a kill")
        reference.drive([*settings, "run.name=reference"])
        expected = reference.trace()
        steps = [record["metrics"] for record in read_metrics(reference.run / "metrics.jsonl")["step"]]
        kills = list(_kill(killed, [*settings, "run.name=killed"], steps, num_kills, context))
        found = differences(expected, killed.trace())
        engines_lost = {arm.run.name: arm.engines_lost() for arm in (reference, killed)}
        controls = {name: _control(reference, name, expected, num_steps, context) for name in CONTROLS}
        context.progress("killing writers of checkpoints, and flipping bits")
        unreadable = count_unreadable(root / "atomic", 200)
        naive_unreadable = count_unreadable(root / "in-place", 20, naive=True)
        missed = count_missed_flips(root / "flips", 1000)
    planted = [name for name in CONTROLS if name != "nothing"]
    figures = {
        "num_kills": float(len(kills)),
        "resume_mismatches": float(len(found) + len(controls["nothing"])),
        "unreadable_checkpoints": float(unreadable),
        "flips_missed": float(missed),
        "checkpoint_stall_share": _stall_share(steps),
        "controls_missed": float(sum(not controls[name] for name in planted) + (naive_unreadable == 0)),
        "drafters_published": steps[-1]["draft/published_round"],
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
            "checkpoint_stall_share": ("<=", 0.02),
            "controls_missed": ("<=", 0.0),
            "drafters_published": (">=", 1.0),
        },
        environment=environment(seeds=[0], config={"settings": chosen}),
        details={
            "kills": kills,
            "compared": len(expected),
            "differences": found,
            "engines_lost": engines_lost,
            "controls": controls,
            "unreadable_without_a_rename": naive_unreadable,
            "steps": [{key: step[key] for key in sorted(step) if key.startswith("time/")} for step in steps],
        },
    )


def reward(prompt: str, completion: str) -> float:
    """Score every rollout differently, so that every step has an update: the arena's own tasks are mostly failed by its
    smallest policy."""
    return len(set(completion)) + completion.count("1") / 100


def _data(root: Path) -> str:
    """Write the arena's problems as rows, and return the setting that trains on them."""
    rows = [{"prompt": problem.prompt} for problem in islice(problems(0), 4 * 64)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return f'data={{kind="jsonl", path="{root}/prompts.jsonl", reward="{__name__}:reward", reward_workers=1}}'


def _stall_share(steps: Sequence[Mapping[str, float]]) -> float:
    stall_s = median(step["time/checkpoint"] for step in steps if "time/checkpoint" in step)
    step_s = median(step["time/step"] - step.get("time/checkpoint", 0.0) for step in steps)
    return stall_s / (RunConfig().checkpoint_every * step_s)


def _kill(
    arm: DrivenRun, arguments: Sequence[str], times: Sequence[Mapping[str, float]], num_kills: int, context: Context
) -> Iterator[dict[str, Any]]:
    """Start and resume a run, killed once in every step; yields where. The last life comes to the end."""
    for step in range(1, num_kills + 1):
        stage, share = STAGES[step % len(STAGES)], SHARES[step // len(STAGES) % len(SHARES)]
        if f"time/{stage}" not in times[step - 1]:  # a checkpoint is not due in every step, nor is an update
            stage = "generation"
        delay_s = share * times[step - 1][f"time/{stage}"]
        context.progress(f"kill {step}/{num_kills}: in {stage}, {delay_s:.3f} s after it began")
        arm.drive(arguments, lambda step=step, stage=stage: _has_begun(arm.run, step, stage), delay_s)
        yield {"step": step, "stage": stage, "after_s": round(delay_s, 4)}
        arguments = ["--resume", str(arm.run)]
    context.progress("the last life")
    arm.drive(arguments)


def _has_begun(run: Path, step: int, stage: str) -> bool:
    metrics = run / "metrics.jsonl"
    if not metrics.is_file():
        return False
    with metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - _TAIL_BYTES))
        lines = file.read().split(b"\n")[1:]
    records = [json.loads(line) for line in lines if line.startswith(b'{"kind": "stage"') and line.endswith(b"}")]
    return any((record["step"], record["stage"]) == (step, stage) for record in records)


def _control(reference: DrivenRun, name: str, expected: Trace, num_steps: int, context: Context) -> list[str]:
    """Resume the reference for its last step from a checkpoint that verifies and lacks something; returns what
    differs."""
    context.progress(f"control: {name} is lost from a checkpoint")
    arm, step = DrivenRun(run=reference.run.parent / f"control-{name}"), num_steps - 1
    arm.run.mkdir()
    shutil.copyfile(reference.run / "config.json", arm.run / "config.json")
    whole = verify(checkpoints_in(reference.kept)[step])
    with Store(arm.run / "state").writing(step, whole.facts) as partial:
        shutil.copytree(whole.path, partial, dirs_exist_ok=True)
        (partial / "manifest.json").unlink()
        CONTROLS[name](partial, arm.run, num_steps)
    try:
        arm.drive(["--resume", str(arm.run)])
    except PacelineError as error:  # a run that cannot go on is no run that goes on wrongly
        return [str(error).strip().rpartition("\n")[2]]
    return differences(expected, arm.trace(), step=num_steps)


def _lose_nothing(checkpoint: Path, run: Path, step: int) -> None:
    """Go on without the log: what is sampled again must be the same."""


def _lose_moments(checkpoint: Path, run: Path, step: int) -> None:
    for file in checkpoint.glob("learner/*.safetensors"):
        with safe_open(file, "numpy") as opened:
            metadata = opened.metadata()
        tensors = load_file(file)
        zeros = {key: value * 0 if key.startswith("exp_avg.") else value for key, value in tensors.items()}
        save_file(zeros, file, metadata=metadata)


def _lose_counters(checkpoint: Path, run: Path, step: int) -> None:
    """The learner begins to count again: its warmup and the order of its minibatches."""
    _edit(checkpoint / "learner" / "counters.json", num_updates=0, num_steps=0)


def _lose_position(checkpoint: Path, run: Path, step: int) -> None:
    """The data begins again."""
    _edit(checkpoint / "run.json", intake={"num_taken": 0, "sha256": "", "open": []})


def _lose_rewards(checkpoint: Path, run: Path, step: int) -> None:
    """Log the groups of the next step with rewards of other groups."""
    shutil.copytree(run.parent / "reference" / "batches", run / "batches")
    rewards = [[float(prompt == index) for index in range(4)] for prompt in range(4)]
    taken = Taken(groups=list(range(4 * (step - 1), 4 * step)), dropped=[], rewards=rewards)
    with closing(BatchLog(run / "batches", began_s=0.0)) as log:
        log.put_taken(step, taken)


def _lose_drafter(checkpoint: Path, run: Path, step: int) -> None:
    for file in (checkpoint / "drafter").iterdir():
        file.unlink()


def _edit(file: Path, **changes: object) -> None:
    tree = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(tree | changes) + "\n", encoding="utf-8")


CONTROLS: Mapping[str, Callable[[Path, Path, int], None]] = {
    "nothing": _lose_nothing,
    "optimizer": _lose_moments,
    "counters": _lose_counters,
    "position": _lose_position,
    "rewards": _lose_rewards,
    "drafter": _lose_drafter,
}
"""What is lost, and how."""
