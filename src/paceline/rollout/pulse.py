"""Tells an engine that is frozen from one that is only busy, by what its processes are at.

A step may take long: a prefill of many thousand tokens, code that is compiled on its first use. No token comes then and
no call is answered, but a core works on it, or polls for the GPU; on a crowded machine a process waits for its core,
and on a cold one for the disk. A process that was stopped, or whose threads wait for each other, hardly uses a core and
does not want one: one that waits looks around now and then, which is a percent of it. So an engine that owes an answer
is frozen when nothing was heard of it, and none of its processes has computed or wanted to for `STOPPED_S` with one of
them stopped, for `ASLEEP_S` with all of them asleep. What spins without getting anywhere is left to
`rollout.engine.progress_deadline_s`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import psutil

QUIET_S = 2.0
"""An answer may take this long before anybody looks at processes, which costs milliseconds."""
STOPPED_S = 8.0
ASLEEP_S = 20.0
"""Twice what a step sleeps if vLLM's processes miss both its call and its answer: they look for themselves every 5 s
(`SHM_READER_RECHECK_INTERVAL_MS` in its shm_broadcast.py)."""
COMPUTES_SHARE = 0.05
"""Share of a core from which on a process counts as computing: far more than one that waits uses."""
_SMALLEST_S = 0.05
"""The system counts in hundredths of a second; less than this in a moment says nothing."""
_WANTS_TO = frozenset({psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP})
_STOPPED = frozenset({psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP})


class Vitals(NamedTuple):
    used_s: float
    """Time that the process has spent on cores so far."""
    status: str
    """State of its main thread, as psutil calls it."""


class Pulse:
    """What one engine's processes have been at lately. The caller passes its clock in."""

    def __init__(self, look: Callable[[], Mapping[int, Vitals]]) -> None:
        """`look` tells the vitals of the engine's processes, by id."""
        self._look = look
        self._since: tuple[float, Mapping[int, Vitals]] | None = None
        """When they were last alive, and how they were then; None while there is no reason to look."""

    def frozen(self, *, silent_s: float, now_s: float) -> bool:
        """Whether the engine, which owes an answer since `silent_s`, has shown no life for too long. To be called every
        second or two."""
        if silent_s < QUIET_S:
            self._since = None
            return False
        vitals = self._look()
        if self._since is None or _alive(self._since[1], vitals, now_s - self._since[0]):
            self._since = (now_s, vitals)
        stopped = any(one.status in _STOPPED for one in vitals.values())
        return now_s - self._since[0] > (STOPPED_S if stopped else ASLEEP_S)


def _alive(before: Mapping[int, Vitals], now: Mapping[int, Vitals], passed_s: float) -> bool:
    if before.keys() != now.keys():
        return True  # a compiler has come or gone
    enough_s = max(_SMALLEST_S, COMPUTES_SHARE * passed_s)
    return any(one.status in _WANTS_TO or one.used_s - before[pid].used_s > enough_s for pid, one in now.items())


def vitals_of(processes: Sequence[psutil.Process]) -> dict[int, Vitals]:
    """How processes are, by id; those included that compile for them."""
    vitals: dict[int, Vitals] = {}
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            for member in (process, *process.children(recursive=True)):
                with member.oneshot():
                    times = member.cpu_times()
                    vitals[member.pid] = Vitals(times.user + times.system, member.status())
    return vitals
