"""Detect frozen engines by the CPU time and state of their processes.

A busy engine uses a core, polls for the GPU, or waits for a core or the disk. A stopped or deadlocked process uses
about 1 % of a core and is neither running nor in disk sleep. So an engine that owes an answer is frozen if none of its
processes has been active for `STOPPED_S` with a stopped process, or for `ASLEEP_S` with all asleep. Busy loops are left
to `rollout.engine.deadline_s`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import psutil

QUIET_S = 2.0
"""Silence before processes are inspected, which costs milliseconds."""
STOPPED_S = 8.0
ASLEEP_S = 20.0
"""Twice the sleep of a step if vLLM's processes miss both its call and its answer: they recheck every 5 s
(`SHM_READER_RECHECK_INTERVAL_MS` in its shm_broadcast.py)."""
COMPUTES_SHARE = 0.05
"""Share of a core above which a process counts as computing, far above polling."""
_SMALLEST_S = 0.05
"""CPU time is counted in hundredths of a second; smaller differences are noise."""
_WANTS_TO = frozenset({psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP})
_STOPPED = frozenset({psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP})


class Vitals(NamedTuple):
    used_s: float
    """CPU time of the process so far."""
    status: str
    """psutil status of its main thread."""


class Pulse:
    """Recent activity of one engine's processes. The caller passes the time."""

    def __init__(self, look: Callable[[], Mapping[int, Vitals]]) -> None:
        """`look` returns the vitals of the engine's processes by id."""
        self._look = look
        self._since: tuple[float, Mapping[int, Vitals]] | None = None
        """Time and vitals of the last activity, None while the engine answers."""

    def frozen(self, *, silent_s: float, now_s: float) -> bool:
        """Return whether the engine is frozen, with an answer overdue by `silent_s`. Call every second or two."""
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
        return True  # a compiler has started or ended
    enough_s = max(_SMALLEST_S, COMPUTES_SHARE * passed_s)
    return any(one.status in _WANTS_TO or one.used_s - before[pid].used_s > enough_s for pid, one in now.items())


def vitals_of(processes: Sequence[psutil.Process]) -> dict[int, Vitals]:
    """Return vitals by process id, children (compilers) included."""
    vitals: dict[int, Vitals] = {}
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            for member in (process, *process.children(recursive=True)):
                with member.oneshot():
                    times = member.cpu_times()
                    vitals[member.pid] = Vitals(times.user + times.system, member.status())
    return vitals
