"""Kill and stop the processes of runs with real engines, at random.

    busy     a machine with as many busy processes as cores, engines that compile; trainers are killed
    steady   60 steps, an engine fault in every tenth
    twins    two runs of equal seeds, one plain, one that speculates and loses engines in mid-rollout
    dense    the same run continues with a fault every two or three steps: engines, learner, driver

    num_faults                            faults whose process was alive before, and ended or stopped after
    lost_rollouts, doubled_rollouts       in all batches that the run trained on
    crash_found_s, idle_crash_found_s,    longest time from the end or stop of the process to its event in metrics.jsonl
    hang_found_s
    not_healed                            faults after which the part was not restored
    false_alarms                          losses without a fault
    orphans                               processes that are alive 10 s after their driver ended
    regenerated_equal                     share of equal rollouts in the twins' steps with a loss
    num_regenerated                       rollouts that were generated again in them
    useful_time                           60 x median time of steps with both engines alive / time of the 60 steps

Out of memory is simulated as the kernel does it: SIGKILL for the largest process of an engine, vLLM's worker.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.harness import ARENA, Record
from benchmarks.victim import Signal, VictimRun, count_orphans, eventually, is_gone, strike
from paceline.context import Context
from paceline.metrics import read_metrics
from paceline.orchestrator.members import place_of
from paceline.report.equality import compare_tokens

_FOUND_DEADLINE_S, _HEALED_DEADLINE_S = 120.0, 900.0
_NUM_ENGINES, _NUM_STEPS = 2, 60
_PROMPTS, _SIBLINGS = 24, 16
LOSSES = ("engine_lost", "learner_lost", "trainer_lost")
BUSY, IDLE, HANG = "crash_found_s", "idle_crash_found_s", "hang_found_s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    victim: str
    """A role in victim.py."""
    how: Signal
    stage: str = "generation"
    """Stage of a step in which it is planted."""
    figure: str | None = None
    """Figure of the time until it is found."""

    def __str__(self) -> str:
        return f"{self.how} {self.victim} in {self.stage}"

    @property
    def part(self) -> str:
        return self.victim if self.victim in ("learner", "trainer") else "engine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    fault: str
    step: int
    witnessed: bool
    healed_s: float | None
    figure: str | None = None
    found_s: float | None = None
    event: Mapping[str, Any] | None = None


KILL_ACTOR = Fault(victim="actor", how="kill", figure=BUSY)
KILL_CORE = Fault(victim="core", how="kill", figure=BUSY)
KILL_IDLE_ACTOR = Fault(victim="actor", how="kill", stage="logprob", figure=IDLE)
KILL_IDLE_CORE = Fault(victim="core", how="kill", stage="logprob", figure=IDLE)
STOP_ACTOR = Fault(victim="actor", how="stop", figure=HANG)
STOP_CORE = Fault(victim="core", how="stop", figure=HANG)
OUT_OF_MEMORY = Fault(victim="largest", how="kill", figure=BUSY)
KILL_LEARNER = Fault(victim="learner", how="kill", stage="train")
KILL_IDLE_LEARNER = Fault(victim="learner", how="kill")
KILL_TRAINER = Fault(victim="trainer", how="kill", stage="draft")
KILL_DRIVER = Fault(victim="driver", how="kill")
TERM_DRIVER = Fault(victim="driver", how="term", stage="train")
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
_LONG_SETTINGS = (
    "run.steps=10000",
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
_TWIN_SETTINGS = (
    "run.steps=6",
    f"rollout.prompts_per_step={_PROMPTS}",
    f"rollout.group_size={_SIBLINGS}",
    "rollout.engine.dtype=float32",
    "correction.kind=recompute",
)
_COUPLED = ("speculation.drafter.kind=history", "speculation.verification=coupled")
GOALS: dict[str, Any] = {
    "num_faults": (">=", 20.0),
    "lost_rollouts": ("<=", 0.0),
    "doubled_rollouts": ("<=", 0.0),
    BUSY: ("<=", 1.0),
    IDLE: ("<=", 15.0),
    HANG: ("<=", 15.0),
    "not_healed": ("<=", 0.0),
    "false_alarms": ("<=", 0.0),
    "orphans": ("<=", 0.0),
    "regenerated_equal": (">=", 1.0),
    "num_regenerated": (">=", 1.0),
    "useful_time": (">=", 0.8),
}


def run(overrides: Sequence[str], context: Context) -> Record:
    found = _Faults(context)
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        common = [*_SETTINGS, f'run.directory="{root}"', *overrides]
        with closing(VictimRun(root / "busy")) as busy, _busy_machine():
            caches = {name: f"{root}/cache/{name}" for name in ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR")}
            busy.start([str(ARENA), *common, *_BUSY_SETTINGS, "run.name=busy"], {**os.environ, **caches})
            for step in (2, 4):
                found.plant(busy, KILL_TRAINER, step)
            busy.finish()
        share, num_regenerated = regenerated_equal(root, common, found)
        with closing(VictimRun(root / "long")) as long:
            long.start([str(ARENA), *common, *_LONG_SETTINGS, "run.name=long"])
            for number, fault in enumerate(STEADY):
                found.plant(long, fault, 10 * number + 5)
            long.wait_for_stage("data", _NUM_STEPS + 1)
            useful, typical_s = useful_time([seen.record for seen in long.seen], _NUM_STEPS)
            step = 0
            for index in found.rng.permutation(len(DENSE)):
                step = found.plant(long, DENSE[index], step) + 2
            step = long.wait_for_stage("data", step + 1)
            found.plant(long, TERM_DRIVER, step, [f"run.steps={step + 4}"])
            long.finish()
        kept = read_metrics(root / "long" / "metrics.jsonl")
    lost, doubled = miscounted(kept["rollouts"], len(kept["step"]), num_rollouts=_PROMPTS * _SIBLINGS)
    alarms = false_alarms([seen.record for seen in (*busy.seen, *long.seen)], found.outcomes)
    record = Record(goals=GOALS, config={"settings": [*_SETTINGS, *_LONG_SETTINGS, *overrides]})
    record.add("num_faults", sum(one.witnessed for one in found.outcomes))
    record.add("lost_rollouts", lost)
    record.add("doubled_rollouts", doubled)
    for figure in (BUSY, IDLE, HANG):
        times = [one.found_s for one in found.outcomes if one.figure == figure and one.found_s is not None]
        record.add(figure, max(times), max(times) - min(times))
    record.add("not_healed", sum(one.healed_s is None for one in found.outcomes))
    record.add("false_alarms", len(alarms))
    record.add("orphans", found.orphans)
    record.add("regenerated_equal", share)
    record.add("num_regenerated", num_regenerated)
    record.add("useful_time", useful)
    record.details |= {
        "faults": [asdict(one) for one in found.outcomes],
        "false_alarms": alarms,
        "num_steps": len(kept["step"]),
        "step_without_fault_s": typical_s,
    }
    return record


def regenerated_equal(root: Path, settings: Sequence[str], found: _Faults) -> tuple[float, int]:
    """Run the twins. Return the share of equal rollouts in the steps that lost an engine, and the number of rollouts
    that these steps generated again."""
    with closing(VictimRun(root / "whole")) as whole:
        whole.start([str(ARENA), *settings, *_TWIN_SETTINGS, "run.name=whole"])
        whole.finish()
    with closing(VictimRun(root / "hurt")) as hurt:
        hurt.start([str(ARENA), *settings, *_TWIN_SETTINGS, *_COUPLED, "run.name=hurt"])
        for step, fault in ((2, KILL_ACTOR), (4, KILL_CORE)):
            found.plant(hurt, fault, step)
        hurt.finish()
        lost = [seen.record for seen in hurt.seen if seen.record.get("what") == "engine_lost"]
    steps = {record["step"] for record in lost}
    compared = compare_tokens(root / "hurt", root / "whole", steps)
    return compared.num_equal / max(1, compared.num_rollouts), sum(record["redispatched"] for record in lost)


class _Faults:
    """Plant faults at random moments, and collect their outcomes."""

    def __init__(self, context: Context) -> None:
        self.rng = np.random.default_rng(0)
        self.outcomes: list[Outcome] = []
        self.orphans = 0
        self._context = context

    def plant(self, run: VictimRun, fault: Fault, step: int, resume_with: Sequence[str] = ()) -> int:
        """Plant the fault in this step, or in the next that begins; wait until it is healed. Return the step."""
        step = self._await_moment(run, fault, step)
        one = self._end_driver(run, fault, step, resume_with) if fault.victim == "driver" else _hurt(run, fault, step)
        self.outcomes.append(one)
        self._context.progress(f"fault {len(self.outcomes)}: {one}")
        return step

    def _await_moment(self, run: VictimRun, fault: Fault, step: int) -> int:
        run.look()
        steps = [seen.record for seen in run.seen if seen.record["kind"] == "step"]
        last = max((seen.record["step"] for seen in run.seen if "step" in seen.record), default=0)
        step = run.wait_for_stage(fault.stage, max(step, last + 1))
        if fault.stage == "generation":
            typical_s = median([record["metrics"]["time/generation"] for record in steps[-5:]] or [1.0])
            time.sleep(typical_s * self.rng.uniform(0.1, 0.4))
        run.look()
        return step

    def _end_driver(self, run: VictimRun, fault: Fault, step: int, resume_with: Sequence[str]) -> Outcome:
        """End the driver, count the orphans, and resume the run."""
        family, struck_s = run.family(), time.monotonic()
        witnessed = strike(family[0], fault.how) is not None
        self.orphans += count_orphans(family, struck_s)
        code = run.driver.wait(60.0)
        run.start(["--resume", str(run.directory), *resume_with])
        healed = run.wait_for(
            lambda record: record["kind"] == "step", since=len(run.seen), deadline_s=_HEALED_DEADLINE_S
        )
        return Outcome(
            fault=str(fault),
            step=step,
            witnessed=witnessed and code == (os.EX_TEMPFAIL if fault.how == "term" else -signal.SIGKILL),
            healed_s=None if healed is None else healed.at_s - struck_s,
        )


def _hurt(run: VictimRun, fault: Fault, step: int) -> Outcome:
    since, victims = len(run.seen), run.processes(fault.victim)
    # The oldest, so that engines take turns and each has run for a while.
    victim, struck_s = min(victims, key=lambda process: process.create_time()), time.monotonic()
    ended_s = strike(victim, fault.how)
    lost = run.wait_for_event(f"{fault.part}_lost", since=since, deadline_s=_FOUND_DEADLINE_S)
    healed_at_s: float | None = None
    if lost is not None and fault.part == "trainer":

        def restored() -> bool:
            run.look()
            return sum(not is_gone(process) for process in run.processes("trainer")) >= len(victims)

        healed_at_s = time.monotonic() if eventually(restored, _HEALED_DEADLINE_S) else None
    elif lost is not None:
        of = place_of(lost.record.get("engine", ""))
        healed = run.wait_for_event(f"{fault.part}_healed", since=since, deadline_s=_HEALED_DEADLINE_S, of=of)
        healed_at_s = None if healed is None else healed.at_s
    return Outcome(
        fault=str(fault),
        step=step,
        witnessed=ended_s is not None,
        healed_s=None if healed_at_s is None else healed_at_s - struck_s,
        figure=fault.figure,
        found_s=float("inf") if lost is None else max(0.0, lost.at_s - (ended_s or struck_s)),
        event=None if lost is None else lost.record,
    )


def useful_time(records: Sequence[Mapping[str, Any]], num_steps: int) -> tuple[float, float]:
    """Return the time of the first steps without faults over their time, and the time of a step without a fault."""
    steps = {record["step"]: record for record in records if record["kind"] == "step" and record["step"] <= num_steps}
    sound = [
        record["metrics"]["time/step"]
        for step, record in steps.items()
        if all(_is_whole(steps[near]["metrics"]) for near in (step - 1, step) if near in steps)
    ]
    began_s = next(record["time_s"] for record in records if record["kind"] == "stage" and record["step"] == 1)
    return num_steps * median(sound) / (steps[num_steps]["time_s"] - began_s), median(sound)


def _is_whole(metrics: Mapping[str, float]) -> bool:
    """Return whether no engine was lost or joined in the step, and all were there at its end."""
    return not metrics["engine/lost"] and not metrics["engine/restarted"] and metrics["fleet/engines"] == _NUM_ENGINES


def miscounted(rollouts: Sequence[Mapping[str, Any]], num_steps: int, *, num_rollouts: int) -> tuple[int, int]:
    """Return the numbers of lost rollouts and of rollouts that were trained on twice."""
    keys = Counter(key for record in rollouts for key in zip(record["group"], record["index"], strict=True))
    return num_rollouts * num_steps - len(keys), keys.total() - len(keys)


def false_alarms(records: Sequence[Mapping[str, Any]], outcomes: Sequence[Outcome]) -> list[Mapping[str, Any]]:
    """Return losses that belong to no fault."""
    losses = [record for record in records if record["kind"] == "event" and record["what"] in LOSSES]
    return [record for record in losses if not any(record is one.event for one in outcomes)]


@contextmanager
def _busy_machine() -> Iterator[None]:
    """Keep every core busy with another process."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in os.sched_getaffinity(0)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()
