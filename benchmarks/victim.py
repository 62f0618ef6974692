"""A `paceline train` in a process of its own, for a bench that kills and stops its processes."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from paceline.types import PacelineError

Signal = Literal["kill", "stop", "term"]
"""SIGKILL; SIGSTOP, for any cause of a frozen process; SIGTERM."""
_LOOK_S = 0.01
_EFFECT_S = 30.0
"""Time in which the system ends or stops a process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A record of metrics.jsonl, and the time when it was read."""

    at_s: float
    record: Mapping[str, Any]


class VictimRun:
    """One run, which may be killed and resumed. Records that a resumed run drops are kept."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.seen: list[Seen] = []
        self._log = directory.with_suffix(".log")
        self._metrics = directory / "metrics.jsonl"
        self._num_starts = 0
        self._offset: int | None = None
        """Place of the next record since the last start; None before the first."""

    def start(self, arguments: Sequence[str], environ: Mapping[str, str] | None = None) -> None:
        self._num_starts += 1
        self._offset = None
        with self._log.open("a") as log:
            command = [sys.executable, "-m", "paceline.cli", "train", *arguments]
            self.driver = subprocess.Popen(command, stdout=log, stderr=log, env=environ)  # noqa: S603

    def look(self) -> None:
        """Read the records written since the last look."""
        try:
            with self._metrics.open("rb") as file:
                file.seek(self._offset or 0)
                written = file.read()
        except FileNotFoundError:
            return
        at_s = time.monotonic()
        whole = written[: written.rfind(b"\n") + 1]
        if self._offset is None:  # skip the records before those of this start
            begins = [line for line in whole.splitlines(keepends=True) if line.startswith(b'{"kind": "run"')]
            if len(begins) < self._num_starts:
                return
            self._offset = whole.rindex(begins[-1]) + len(begins[-1])
            whole = whole[self._offset :]
        self._offset += len(whole)
        self.seen += [Seen(at_s=at_s, record=json.loads(line)) for line in whole.splitlines()]

    def wait_for(
        self, found: Callable[[Mapping[str, Any]], bool], *, since: int = 0, deadline_s: float = 900.0
    ) -> Seen | None:
        """Return the first such record from number `since` on, or None after the deadline. Raise PacelineError if the
        run ends."""
        until_s = time.monotonic() + deadline_s
        while True:
            ended = self.driver.poll()
            self.look()
            for seen in self.seen[since:]:
                if found(seen.record):
                    return seen
            since = len(self.seen)
            if ended is not None:
                raise PacelineError(f"the run ended with code {ended}: {self.last_lines()}")
            if time.monotonic() > until_s:
                return None
            time.sleep(_LOOK_S)

    def wait_for_stage(self, stage: str, step: int) -> int:
        """Wait for this stage of this step or of a later one; return the step."""
        seen = self.wait_for(
            lambda record: record["kind"] == "stage" and record["stage"] == stage and record["step"] >= step,
            deadline_s=1800.0,
        )
        if seen is None:
            raise PacelineError(f"the run did not reach {stage} of step {step}: {self.last_lines()}")
        return seen.record["step"]

    def wait_for_event(self, what: str, *, since: int, deadline_s: float, of: str = "") -> Seen | None:
        """Return the first such event, about the engines of the place `of`."""

        def found(record: Mapping[str, Any]) -> bool:
            return record["kind"] == "event" and record["what"] == what and record.get("engine", "").startswith(of)

        return self.wait_for(found, since=since, deadline_s=deadline_s)

    def finish(self) -> None:
        """Wait for a regular end."""
        code = self.driver.wait(900.0)
        self.look()
        if code != 0:
            raise PacelineError(f"the run ended with code {code}: {self.last_lines()}")

    def close(self) -> None:
        if self._num_starts:
            self.driver.kill()
            self.driver.wait()

    def last_lines(self) -> str:
        return self._log.read_text(encoding="utf-8")[-2000:]

    def processes(self, role: str) -> list[psutil.Process]:
        """Return processes of a role: `actor`, `core` and `largest` of engines, `learner` or `trainer`."""
        children = psutil.Process(self.driver.pid).children(recursive=True)
        if role != "largest":
            return [process for process in children if role_of(process) == role]
        return [
            # Out of memory, the kernel kills the largest process.
            max((actor, *actor.children(recursive=True)), key=lambda member: member.memory_info().rss)
            for actor in children
            if role_of(actor) == "actor"
        ]

    def family(self) -> list[psutil.Process]:
        driver = psutil.Process(self.driver.pid)
        return [driver, *driver.children(recursive=True)]


def role_of(process: psutil.Process) -> str | None:
    """Return the role by the names that Ray and vLLM give to processes, or by the parent if vLLM cannot set one."""
    try:
        line, parent = " ".join(process.cmdline()), process.parent()
        spawned = "spawn_main" in line and parent is not None and "EngineActor" in " ".join(parent.cmdline())
    except psutil.Error:
        return None
    if "EngineCore" in line or spawned:
        return "core"
    names = {"EngineActor": "actor", "LearnerActor": "learner", "paceline.drafters.worker": "trainer"}
    return next((role for name, role in names.items() if name in line), None)


def is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def strike(victim: psutil.Process, how: Signal) -> float | None:
    """Signal a process and return the time at which it has ended or stopped; None if it had before, or does not.

    A killed process lives until the system has freed its memory, which may take seconds."""
    if is_gone(victim) or (how != "kill" and victim.status() == psutil.STATUS_STOPPED):
        return None
    match how:
        case "kill":
            watch = os.pidfd_open(victim.pid)
            try:
                victim.send_signal(signal.SIGKILL)
                ended = bool(select.select([watch], [], [], _EFFECT_S)[0])
            finally:
                os.close(watch)
        case "stop":
            victim.send_signal(signal.SIGSTOP)
            ended = eventually(lambda: not is_gone(victim) and victim.status() == psutil.STATUS_STOPPED, _EFFECT_S)
        case "term":
            victim.send_signal(signal.SIGTERM)
            ended = True
    return time.monotonic() if ended else None


def count_orphans(family: Sequence[psutil.Process], struck_s: float, *, after_s: float = 10.0) -> int:
    """Count the run's processes that are alive so long after the signal."""
    eventually(lambda: all(map(is_gone, family)), struck_s + after_s - time.monotonic())
    return sum(not is_gone(process) for process in family)


def eventually(condition: Callable[[], bool], within_s: float) -> bool:
    until_s = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > until_s:
            return False
        time.sleep(_LOOK_S)
    return True
