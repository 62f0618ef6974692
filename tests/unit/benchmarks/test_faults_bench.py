"""Counts of the bench `faults`, and its signals to processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.faults import Outcome, false_alarms, miscounted, useful_time
from benchmarks.victim import VictimRun, count_orphans, strike


@pytest.fixture
def victim() -> Iterator[psutil.Popen]:
    process = psutil.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"], stdout=-1)
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()


def step_of(number: int, *, time_s: float, took_s: float, lost: int = 0, joined: int = 0, engines: int = 2) -> Any:
    metrics = {"time/step": took_s, "engine/lost": lost, "engine/restarted": joined, "fleet/engines": engines}
    return {"kind": "step", "step": number, "time_s": time_s, "metrics": metrics}


def test_steps_with_a_fault_do_not_say_how_long_a_step_takes() -> None:
    """Were they in the median, a run that is slow all the time would waste nothing."""
    records = [
        {"kind": "stage", "step": 1, "time_s": 100.0},
        step_of(1, time_s=110, took_s=10),
        step_of(2, time_s=150, took_s=40, lost=1, engines=1),
        step_of(3, time_s=180, took_s=30, engines=1),
        step_of(4, time_s=200, took_s=20, joined=1),
        step_of(5, time_s=215, took_s=15),
        step_of(6, time_s=225, took_s=10),
        step_of(7, time_s=999, took_s=774),
    ]
    assert useful_time(records, 6) == (6 * 10 / 125, 10)


def rollouts_of(step: int, keys: list[tuple[int, int]]) -> Any:
    return {"step": step, "group": [group for group, _ in keys], "index": [index for _, index in keys]}


def test_lost_and_doubled_rollouts_are_found() -> None:
    whole = [(0, 0), (0, 1)], [(1, 0), (1, 1)]
    assert miscounted([rollouts_of(1, whole[0]), rollouts_of(2, whole[1])], 2, num_rollouts=2) == (0, 0)
    assert miscounted([rollouts_of(1, whole[0]), rollouts_of(2, whole[1][:1])], 2, num_rollouts=2) == (1, 0)
    assert miscounted([rollouts_of(1, whole[0])], 2, num_rollouts=2) == (2, 0)
    doubled = [rollouts_of(1, whole[0]), rollouts_of(2, [*whole[1], (0, 1)])]
    assert miscounted(doubled, 2, num_rollouts=2) == (0, 1)


def test_second_loss_for_one_fault_is_a_false_alarm() -> None:
    first, second = ({"kind": "event", "what": "engine_lost", "engine": "engine-0", "step": 3} for _ in range(2))
    planted = Outcome(fault="kill core", step=3, witnessed=True, healed_s=1.0, event=first)
    assert false_alarms([first, second], [planted]) == [second]


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_fault_is_witnessed_once(victim: psutil.Popen, how: Any) -> None:
    assert strike(victim, how)
    assert not strike(victim, how), "it is gone or stopped already"


def test_process_that_lives_on_is_an_orphan(victim: psutil.Popen) -> None:
    assert count_orphans([victim], 0.0) == 1
    assert strike(victim, "kill")
    assert count_orphans([victim], 0.0) == 0


def write(file: Path, *records: dict[str, Any]) -> None:
    with file.open("a") as lines:
        lines.writelines(json.dumps(record) + "\n" for record in records)


def test_records_of_an_earlier_life_are_not_taken_for_those_of_a_later_one(tmp_path: Path, monkeypatch) -> None:
    """A resumed run drops records and writes the file anew, while its follower stands somewhere in the old one."""
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: None)
    file, run = tmp_path / "metrics.jsonl", VictimRun(tmp_path)
    run.start([])
    run.look()
    write(file, {"kind": "run"}, {"kind": "step", "step": 1})
    run.look()
    with file.open("a") as lines:
        lines.write('{"kind": "step", "st')
    run.look()
    with file.open("a") as lines:
        lines.write('ep": 2}\n')
    run.look()
    assert [seen.record["step"] for seen in run.seen] == [1, 2]
    run.start(["--resume"])
    run.look()
    file.unlink()
    write(file, {"kind": "run"}, {"kind": "step", "step": 1})
    run.look()
    write(file, {"kind": "run"}, {"kind": "step", "step": 2})
    run.look()
    write(file, {"kind": "step", "step": 3})
    run.look()
    assert [seen.record["step"] for seen in run.seen] == [1, 2, 2, 3]
