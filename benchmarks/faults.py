"""What a run does when its processes are killed or stopped.

    busy     a machine with as many busy processes as cores, engines that compile, long prompts; trainers are killed
    steady   60 steps, an engine fault in every tenth                                        useful_time
    dense    the same run goes on with a fault every two or three steps: engines, learner, driver

    useful_time = 60 x median time of the steps without a fault / time of the 60 steps

A step is without a fault if both engines were alive all through it. A fault counts if it was witnessed: the process was
there before, and gone or stopped after. The time until a fault is found begins then (what the system takes to end a
killed process, most of it for its memory, is in the details) and ends when its event is seen in metrics.jsonl. A loss
that nothing was done for is a false alarm. Out of memory is what the kernel makes of it: SIGKILL for the largest
process of an engine, which is vLLM's worker.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil

from benchmarks.hurt_run import Blow, HurtRun, count_orphans, is_gone, role_of, strike
from paceline.context import Context
from paceline.measure import Result, environment
from paceline.metrics import read_metrics
from paceline.orchestrator.members import place_of
from paceline.types import PacelineError

Row = dict[str, Any]
LOSSES = ("engine_lost", "learner_lost", "trainer_lost")
_FOUND_DEADLINE_S, _HEALED_DEADLINE_S = 120.0, 900.0
_NUM_ENGINES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultKind:
    victim: str
    """A role in hurt_run.py."""
    blow: Blow
    stage: str
    """Stage of a step in which it comes."""
    figure: str | None = None
    """Figure that its time until it is found belongs to."""

    @property
    def name(self) -> str:
        return f"{self.blow} {self.victim} in {self.stage}"

    @property
    def part(self) -> str:
        return self.victim if self.victim in ("learner", "trainer") else "engine"


_BUSY, _IDLE, _HANG = "crash_found_s", "idle_crash_found_s", "hang_found_s"
KILL_ACTOR = FaultKind(victim="actor", blow="kill", stage="generation", figure=_BUSY)
KILL_CORE = FaultKind(victim="core", blow="kill", stage="generation", figure=_BUSY)
KILL_IDLE_ACTOR = FaultKind(victim="actor", blow="kill", stage="logprob", figure=_IDLE)
KILL_IDLE_CORE = FaultKind(victim="core", blow="kill", stage="logprob", figure=_IDLE)
STOP_ACTOR = FaultKind(victim="actor", blow="stop", stage="generation", figure=_HANG)
STOP_CORE = FaultKind(victim="core", blow="stop", stage="generation", figure=_HANG)
OUT_OF_MEMORY = FaultKind(victim="largest", blow="kill", stage="generation", figure=_BUSY)
KILL_LEARNER = FaultKind(victim="learner", blow="kill", stage="train")
KILL_IDLE_LEARNER = FaultKind(victim="learner", blow="kill", stage="generation")
KILL_TRAINER = FaultKind(victim="trainer", blow="kill", stage="draft")
KILL_DRIVER = FaultKind(victim="driver", blow="kill", stage="generation")
TERM_DRIVER = FaultKind(victim="driver", blow="term", stage="train")
STEADY = (KILL_ACTOR, STOP_CORE, KILL_CORE, KILL_IDLE_ACTOR, OUT_OF_MEMORY, KILL_CORE)
DENSE = (
    *(KILL_ACTOR, KILL_CORE, KILL_ACTOR, KILL_IDLE_ACTOR, KILL_IDLE_CORE, STOP_ACTOR, STOP_CORE),
    *(OUT_OF_MEMORY, OUT_OF_MEMORY, KILL_LEARNER, KILL_IDLE_LEARNER, KILL_DRIVER, TERM_DRIVER),
)
_SETTINGS = (
    "policy.model=arena:tiny",
    "run.sinks=[]",
    "run.checkpoint_every=5",
    f"rollout.num_engines={_NUM_ENGINES}",
    "rollout.max_restarts=1000",
    "rollout.engine.kv_cache_gb=0.25",
    "learner.cpus=1",
    "objective.drop_uniform_groups=false",
    "eval.every=0",
)
_PROMPTS, _SIBLINGS = 24, 16
_STEADY_SETTINGS = (
    f"rollout.prompts_per_step={_PROMPTS}",
    f"rollout.group_size={_SIBLINGS}",
    "rollout.engine.max_num_seqs=32",
)
_BUSY_SETTINGS = (
    "run.steps=6",
    "rollout.prompts_per_step=4",
    "rollout.group_size=4",
    "rollout.max_tokens=96",
    "rollout.engine.max_model_len=1024",
    "rollout.engine.compile=true",
    "speculation.drafter.kind=eagle3",
    "speculation.drafter.path=arena:tiny/eagle3",
    "speculation.max_draft_length=3",
    "speculation.training.mode=inline",
    "speculation.training.inline_s=3",
    "speculation.training.when=always",
)
_BUSY_FAULTS = {2: KILL_TRAINER, 4: KILL_TRAINER}


def run(
    *,
    context: Context,
    config_file: Path,
    environ: Mapping[str, str],
    overrides: Sequence[str] = (),
    num_steps: int = 60,
) -> Result:
    """Hurt one run on a busy machine, and one for long; `num_steps` is how long engine faults are rare in that."""
    rng = np.random.default_rng(0)
    rows: list[Row] = []
    orphans: Row = {}
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        settings = [*_SETTINGS, f'run.directory="{root}"']
        with closing(HurtRun(root / "busy", root / "busy.log")) as busy:
            arguments = [_long_prompts(root), *settings, *_BUSY_SETTINGS, "run.name=busy", *overrides]
            caches = {name: f"{root}/cache/{name}" for name in ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR")}
            _hurt_busy(busy, arguments, {**environ, **caches}, rng, rows, context)
        orphans["bench ended by SIGTERM"] = _end_bench(root, context)
        with closing(HurtRun(root / "long", root / "long.log")) as long:
            long.start([str(config_file), *settings, *_STEADY_SETTINGS, "run.steps=10000", "run.name=long", *overrides])
            _hurt_steadily(long, num_steps, rng, rows, context)
            useful, typical_s = useful_time([seen.record for seen in long.seen], num_steps)
            _hurt_densely(long, rng, rows, orphans, context)
        kept = read_metrics(root / "long" / "metrics.jsonl")
        lost, doubled = miscounted(kept["rollouts"], kept["step"], num_rollouts=_PROMPTS * _SIBLINGS)
        alarms = false_alarms([*busy.seen, *long.seen], rows)
    figures = {
        "num_faults": float(sum(row["witnessed"] for row in rows)),
        "lost_rollouts": float(lost),
        "doubled_rollouts": float(doubled),
        **{figure: max(_found(rows, figure), default=float("inf")) for figure in (_BUSY, _IDLE, _HANG)},
        "not_healed": float(sum(not row["healed"] for row in rows)),
        "false_alarms": float(len(alarms)),
        "orphans": float(sum(orphans.values())),
        "useful_time": useful,
    }
    return Result(
        name="faults",
        figures=figures,
        spread=dict.fromkeys(figures, 0.0) | {figure: float(np.ptp(_found(rows, figure))) for figure in _TIMES},
        goals=_GOALS,
        environment=environment(seeds=[0], config={"settings": [*_SETTINGS, *_STEADY_SETTINGS, *overrides]}),
        details={
            "faults": rows,
            "orphans": orphans,
            "false_alarms": alarms,
            "num_steps": len(kept["step"]),
            "tokens_not_trained_on": sum(
                abs(record["metrics"]["policy/num_tokens"] - record["metrics"]["rollout/num_tokens"])
                for record in kept["step"]
            ),
            "step_without_fault_s": typical_s,
        },
    )


_TIMES = (_BUSY, _IDLE, _HANG)
_GOALS: dict[str, Any] = {
    "num_faults": (">=", 20.0),
    "lost_rollouts": ("<=", 0.0),
    "doubled_rollouts": ("<=", 0.0),
    _BUSY: ("<=", 1.0),
    _IDLE: ("<=", 15.0),
    _HANG: ("<=", 15.0),
    "not_healed": ("<=", 0.0),
    "false_alarms": ("<=", 0.0),
    "orphans": ("<=", 0.0),
    "useful_time": (">=", 0.8),
}


def useful_time(records: Sequence[Mapping[str, Any]], num_steps: int) -> tuple[float, float]:
    """Time that the first steps would have taken without faults over the time that they took, and the time of a step
    without a fault."""
    steps = {record["step"]: record for record in records if record["kind"] == "step" and record["step"] <= num_steps}
    sound = [
        record["metrics"]["time/step"]
        for step, record in steps.items()
        if all(_is_whole(steps[near]) for near in (step - 1, step) if near in steps)
    ]
    began_s = next(record["time_s"] for record in records if record["kind"] == "stage" and record["step"] == 1)
    return num_steps * median(sound) / (steps[num_steps]["time_s"] - began_s), median(sound)


def _is_whole(record: Mapping[str, Any]) -> bool:
    """No engine was lost in the step, none joined, and all were there at its end."""
    metrics = record["metrics"]
    return not metrics["engine/lost"] and not metrics["engine/restarted"] and metrics["fleet/engines"] == _NUM_ENGINES


def miscounted(
    rollouts: Sequence[Mapping[str, Any]], steps: Sequence[Mapping[str, Any]], *, num_rollouts: int
) -> tuple[int, int]:
    """How many rollouts were lost, and how many counted twice, in the batches that a run was trained on."""
    keys = Counter(key for record in rollouts for key in zip(record["group"], record["index"], strict=True))
    return num_rollouts * len(steps) - len(keys), keys.total() - len(keys)


def false_alarms(seen: Sequence[Any], rows: Sequence[Row]) -> list[Mapping[str, Any]]:
    """Losses that belong to no fault."""
    known = [row["event"] for row in rows]
    losses = (item.record for item in seen if item.record["kind"] == "event" and item.record["what"] in LOSSES)
    return [record for record in losses if not any(record is event for event in known)]


def _found(rows: Sequence[Row], figure: str) -> list[float]:
    return [row["found_s"] for row in rows if row["figure"] == figure]


def _hurt_steadily(run: HurtRun, num_steps: int, rng: np.random.Generator, rows: list[Row], context: Context) -> None:
    for number, kind in enumerate(STEADY[: num_steps // 10]):
        rows.append(_hurt(run, kind, rng, step=10 * number + 5))
        _tell(rows, context)
    run.wait_for_stage("data", num_steps + 1)


def _hurt_densely(run: HurtRun, rng: np.random.Generator, rows: list[Row], orphans: Row, context: Context) -> None:
    step = 0
    for index in rng.permutation(len(DENSE)):
        kind = DENSE[index]
        if kind.victim == "driver":
            rows.append(_end_driver(run, kind, rng, step=step, orphans=orphans))
        else:
            rows.append(_hurt(run, kind, rng, step=step))
        _tell(rows, context)
        step = rows[-1]["step"] + 2
    run.wait_for_stage("data", step + 1)
    # Now it may end: the last fault is a SIGTERM, after which a few steps are left.
    rows.append(_end_driver(run, TERM_DRIVER, rng, step=step + 1, orphans=orphans, more=[f"run.steps={step + 4}"]))
    _tell(rows, context)
    if (code := run.finish()) != 0:
        raise PacelineError(f"the run ended with code {code}: {run.last_lines()}")


def _hurt_busy(
    run: HurtRun,
    arguments: Sequence[str],
    environ: Mapping[str, str],
    rng: np.random.Generator,
    rows: list[Row],
    context: Context,
) -> None:
    context.progress("a run on a machine with other work to do; its engines compile")
    with _busy_machine():
        run.start(arguments, environ)
        for step, kind in _BUSY_FAULTS.items():
            rows.append(_hurt(run, kind, rng, step=step))
            _tell(rows, context)
        if (code := run.finish()) != 0:
            raise PacelineError(f"the run on a busy machine ended with code {code}: {run.last_lines()}")


def _hurt(run: HurtRun, kind: FaultKind, rng: np.random.Generator, *, step: int) -> Row:
    """Do it in this step, or in the next that begins; returns when it is found and healed, or not in time."""
    step = _await_moment(run, kind, rng, step)
    since = len(run.seen)
    victims = run.processes(kind.victim)
    # The oldest: engines take turns, and each was well for a while.
    victim = min(victims, key=lambda process: process.create_time())
    struck_s = time.monotonic()
    ended_s = strike(victim, kind.blow)
    lost = run.wait_for_event(f"{kind.part}_lost", since=since, deadline_s=_FOUND_DEADLINE_S)
    healed_at_s: float | None = None
    if lost is not None and kind.part == "trainer":
        healed_at_s = _await_trainers(run, len(victims))
    elif lost is not None:
        of = place_of(lost.record.get("engine", ""))
        healed = run.wait_for_event(f"{kind.part}_healed", since=since, deadline_s=_HEALED_DEADLINE_S, of=of)
        healed_at_s = None if healed is None else healed.at_s
    return {
        "fault": kind.name,
        "step": step,
        "figure": kind.figure,
        "witnessed": ended_s is not None,
        "ending_s": None if ended_s is None else ended_s - struck_s,
        "found_s": float("inf") if lost is None else max(0.0, lost.at_s - (ended_s or struck_s)),
        "healed": healed_at_s is not None,
        "healed_s": None if healed_at_s is None else healed_at_s - struck_s,
        "event": None if lost is None else lost.record,
    }


def _end_driver(
    run: HurtRun, kind: FaultKind, rng: np.random.Generator, *, step: int, orphans: Row, more: Sequence[str] = ()
) -> Row:
    """End the driver, count what is left of the run, and resume it."""
    step = _await_moment(run, kind, rng, step)
    family = run.family()
    struck_s = time.monotonic()
    witnessed = strike(family[0], kind.blow) is not None
    orphans[f"{kind.name}, step {step}"] = count_orphans(family, struck_s)
    code = run.driver.wait(60.0)
    run.start(["--resume", str(run.directory), *more])
    healed = run.wait_for(lambda record: record["kind"] == "step", since=len(run.seen), deadline_s=_HEALED_DEADLINE_S)
    return {
        "fault": kind.name,
        "step": step,
        "figure": None,
        "witnessed": witnessed and code == (os.EX_TEMPFAIL if kind.blow == "term" else -signal.SIGKILL),
        "healed": healed is not None,
        "healed_s": None if healed is None else healed.at_s - struck_s,
        "event": None,
    }


def _await_moment(run: HurtRun, kind: FaultKind, rng: np.random.Generator, step: int) -> int:
    """Wait for a moment in the stage, of this step or of the first that is to come; returns the step."""
    run.look()
    steps = [seen.record for seen in run.seen if seen.record["kind"] == "step"]
    last = max((seen.record["step"] for seen in run.seen if "step" in seen.record), default=0)
    step = run.wait_for_stage(kind.stage, max(step, last + 1))
    if kind.stage == "generation":
        typical_s = median([record["metrics"]["time/generation"] for record in steps[-5:]] or [1.0])
        time.sleep(typical_s * rng.uniform(0.1, 0.4))  # the moment of a fault is what is chosen here
    run.look()
    return step


def _await_trainers(run: HurtRun, number: int) -> float | None:
    """When there are so many trainers again; None if that does not come."""
    until_s = time.monotonic() + _HEALED_DEADLINE_S
    while sum(not is_gone(process) for process in run.processes("trainer")) < number:
        if time.monotonic() > until_s or run.driver.poll() is not None:
            return None
        time.sleep(0.1)
        run.look()
    return time.monotonic()


def _end_bench(root: Path, context: Context) -> int:
    """End another bench by SIGTERM while its engine works; returns how many of its processes are left."""
    context.progress("SIGTERM to a bench whose engine works")
    with (root / "bench.log").open("w") as log:
        command = [sys.executable, "-m", "benchmarks", "rollout"]
        bench = psutil.Popen(command, stdout=log, stderr=log)
    try:
        until_s = time.monotonic() + 600
        while not any(role_of(child) == "core" for child in bench.children(recursive=True)):
            if bench.poll() is not None or time.monotonic() > until_s:
                raise PacelineError(f"the bench has no engine: {(root / 'bench.log').read_text()[-2000:]}")
            time.sleep(0.1)
        time.sleep(20)  # it loads, then generates
        family = [bench, *bench.children(recursive=True)]
        bench.send_signal(signal.SIGTERM)
        return count_orphans(family, time.monotonic())
    finally:
        for process in (bench, *bench.children(recursive=True)) if bench.poll() is None else ():
            process.kill()


@contextmanager
def _busy_machine() -> Iterator[None]:
    """As many processes that do nothing but compute as there are cores."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in os.sched_getaffinity(0)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def _long_prompts(root: Path) -> str:
    """Write prompts of about 900 tokens and a reward that tells their answers apart; returns a config's file."""
    rows = [{"prompt": f"{number} " * (900 // (len(str(number)) + 1))} for number in range(100, 200)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (root / "odd.py").write_text("def odd(prompt, completion):\n    return float(len(completion) % 2)\n")
    data = f'[data]\nkind = "jsonl"\npath = "{root}/prompts.jsonl"\nreward = "{root}/odd.py:odd"\nreward_workers = 1\n'
    (root / "busy.toml").write_text(data, encoding="utf-8")
    return str(root / "busy.toml")


def _tell(rows: Sequence[Row], context: Context) -> None:
    row = rows[-1]
    found = f"found after {row['found_s']:.2f} s, " if "found_s" in row else ""
    healed = f"healed after {row['healed_s']:.1f} s" if row["healed"] else "NOT HEALED"
    seen = "" if row["witnessed"] else ", NOT WITNESSED"
    context.progress(f"fault {len(rows)}: {row['fault']}, step {row['step']}: {found}{healed}{seen}")
