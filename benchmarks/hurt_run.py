"""A `paceline train` in a process of its own, for a bench that hurts it: what it records, its processes, and blows."""

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

Blow = Literal["kill", "stop", "term"]
"""SIGKILL; SIGSTOP, which stands for whatever makes a process hang; SIGTERM."""
_LOOK_S = 0.01
_EFFECT_S = 30.0
"""How long the system may take to end or stop a process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A record, and when it was seen in the file."""

    at_s: float
    record: Mapping[str, Any]


class HurtRun:
    """One run in one or several lives: it may be killed and resumed. All records are kept, those that a resumed run
    drops as well."""

    def __init__(self, directory: Path, log: Path) -> None:
        self.directory = directory
        self.seen: list[Seen] = []
        self._log = log
        self._metrics = directory / "metrics.jsonl"
        self._num_lives = 0
        self._offset: int | None = None
        """Where the next record of this life begins; None before its first."""

    def start(self, arguments: Sequence[str], environ: Mapping[str, str] | None = None) -> None:
        """Begin a life, of a new run or with --resume."""
        self._num_lives += 1
        self._offset = None
        with self._log.open("a") as log:
            command = [sys.executable, "-m", "paceline.cli", "train", *arguments]
            self.driver = subprocess.Popen(command, stdout=log, stderr=log, env=environ)  # noqa: S603

    def look(self) -> None:
        """Take in what was written since the last look."""
        try:
            written = self._metrics.read_bytes() if self._offset is None else self._rest(self._offset)
        except FileNotFoundError:
            return
        at_s = time.monotonic()
        whole = written[: written.rfind(b"\n") + 1]
        if self._offset is None:  # earlier lives are before the record with which this one begins
            begins = [line for line in whole.splitlines(keepends=True) if line.startswith(b'{"kind": "run"')]
            if len(begins) < self._num_lives:
                return
            self._offset = whole.rindex(begins[-1]) + len(begins[-1])
            whole = whole[self._offset :]
        self._offset += len(whole)
        self.seen += [Seen(at_s=at_s, record=json.loads(line)) for line in whole.splitlines()]

    def wait_for(
        self, found: Callable[[Mapping[str, Any]], bool], *, since: int = 0, deadline_s: float = 900.0
    ) -> Seen | None:
        """The first record from number `since` on of which `found` is true; None if the time is over. Raises
        PacelineError if the run ends."""
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
        """Wait until this stage of this step or of a later one begins; returns the step."""
        seen = self.wait_for(
            lambda record: record["kind"] == "stage" and record["stage"] == stage and record["step"] >= step,
            deadline_s=1800.0,
        )
        if seen is None:
            raise PacelineError(f"the run did not come to {stage} of step {step}: {self.last_lines()}")
        return seen.record["step"]

    def wait_for_event(self, what: str, *, since: int, deadline_s: float, of: str = "") -> Seen | None:
        """The first such event since then, about the engines of one place if that is given."""
        return self.wait_for(
            lambda record: (
                record["kind"] == "event" and record["what"] == what and record.get("engine", "").startswith(of)
            ),
            since=since,
            deadline_s=deadline_s,
        )

    def finish(self, deadline_s: float = 900.0) -> int:
        """Wait for the end; returns the exit code."""
        until_s = time.monotonic() + deadline_s
        while self.driver.poll() is None and time.monotonic() < until_s:
            self.look()
            time.sleep(10 * _LOOK_S)
        self.look()
        if self.driver.poll() is None:
            raise PacelineError(f"the run did not end within {deadline_s:.0f} s: {self.last_lines()}")
        return self.driver.returncode

    def close(self) -> None:
        """End it, if it has not ended: its processes end with their driver."""
        if self._num_lives:
            self.driver.kill()
            self.driver.wait()

    def last_lines(self) -> str:
        return self._log.read_text(encoding="utf-8")[-2000:]

    def processes(self, role: str) -> list[psutil.Process]:
        """Its processes of this role: `actor`, `core` and `largest` of engines, `learner` or `trainer`."""
        children = psutil.Process(self.driver.pid).children(recursive=True)
        if role == "largest":
            return [largest_of(process) for process in children if role_of(process) == "actor"]
        return [process for process in children if role_of(process) == role]

    def family(self) -> list[psutil.Process]:
        driver = psutil.Process(self.driver.pid)
        return [driver, *driver.children(recursive=True)]

    def _rest(self, offset: int) -> bytes:
        with self._metrics.open("rb") as file:
            file.seek(offset)
            return file.read()


def role_of(process: psutil.Process) -> str | None:
    """Ray names a process by its actor, and vLLM one by what it does; where vLLM's title cannot be set, it is known as
    what an actor spawned."""
    try:
        line = " ".join(process.cmdline())
        spawned = "spawn_main" in line and "EngineActor" in " ".join(process.parent().cmdline())  # pyright: ignore[reportOptionalMemberAccess]
    except (psutil.Error, AttributeError):
        return None
    if "EngineCore" in line or spawned:
        return "core"
    names = {"EngineActor": "actor", "LearnerActor": "learner", "paceline.drafters.worker": "trainer"}
    return next((role for name, role in names.items() if name in line), None)


def largest_of(process: psutil.Process) -> psutil.Process:
    """The process with the most memory, of one and its children: the one that the kernel kills when memory is out."""
    return max((process, *process.children(recursive=True)), key=lambda member: member.memory_info().rss)


def is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def strike(victim: psutil.Process, blow: Blow) -> float | None:
    """Hurt a process; returns when it had ended or stopped. None if it was not there and whole before, or goes on.

    A killed process lives until the system has taken its memory back, which may take seconds, and nobody is told
    before."""
    if is_gone(victim) or (blow != "kill" and victim.status() == psutil.STATUS_STOPPED):
        return None
    match blow:
        case "kill":
            watch = os.pidfd_open(victim.pid)
            try:
                victim.send_signal(signal.SIGKILL)
                ended = bool(select.select([watch], [], [], _EFFECT_S)[0])
            finally:
                os.close(watch)
        case "stop":
            victim.send_signal(signal.SIGSTOP)
            ended = _comes_true(lambda: not is_gone(victim) and victim.status() == psutil.STATUS_STOPPED)
        case "term":
            victim.send_signal(signal.SIGTERM)
            ended = True
    return time.monotonic() if ended else None


def count_orphans(family: Sequence[psutil.Process], struck_s: float, *, after_s: float = 10.0) -> int:
    """How many of a run's processes live on so long after the blow."""
    while time.monotonic() < struck_s + after_s and not all(map(is_gone, family)):
        time.sleep(0.1)
    return sum(not is_gone(process) for process in family)


def _comes_true(condition: Callable[[], bool]) -> bool:
    until_s = time.monotonic() + _EFFECT_S
    while not condition():
        if time.monotonic() > until_s:
            return False
        time.sleep(_LOOK_S)
    return True
