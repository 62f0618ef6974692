"""Tells an engine that is frozen from one that is only busy, by whether its processes still compute.

A step may take long: a prefill of many thousand tokens, code that is compiled on its first use. No token comes then and
no call is answered, but a core works on it, or polls for the GPU. A process that was stopped, or whose threads wait for
each other, hardly uses a core: one that waits looks around now and then, which is a percent of it. So an engine that
owes an answer is frozen when nothing was heard of it, and none of its processes has computed for `FROZEN_S`. What spins
without getting anywhere is left to `rollout.engine.progress_deadline_s`.

On a crowded machine a process gets less of a core than it wants, so less is asked of it there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import psutil

QUIET_S = 2.0
"""An answer may take this long before anybody looks at processes, which costs milliseconds."""
FROZEN_S = 8.0
COMPUTES_SHARE = 0.05
"""Share of a core from which on a process counts as computing: far more than one that waits uses."""
COMPUTES_OF_FAIR = 0.5
"""The same as a share of what is left for each where more want to compute than there are cores."""
_SMALLEST_S = 0.05
"""The system counts in hundredths of a second; less than this in a moment says nothing."""


class Pulse:
    """What one engine's processes have computed lately. The caller passes its clock in."""

    def __init__(self, used_s: Callable[[], Mapping[int, float]], crowd: Callable[[], float]) -> None:
        """`used_s` tells how long each of the engine's processes has used cores so far, by id; `crowd` how many want
        each core."""
        self._used_s, self._crowd = used_s, crowd
        self._since: tuple[float, Mapping[int, float]] | None = None
        """When they computed last, and what each had used by then; None while there is no reason to look."""

    def still_s(self, *, silent_s: float, now_s: float) -> float:
        """How long the engine has been frozen, if it owes an answer since `silent_s`; 0 while it shows any life. To be
        called every second or two."""
        if silent_s < QUIET_S:
            self._since = None
            return 0.0
        used_s = self._used_s()
        if self._since is None or self._computed(self._since[1], used_s, now_s - self._since[0]):
            self._since = (now_s, used_s)
        return now_s - self._since[0]

    def _computed(self, before: Mapping[int, float], now: Mapping[int, float], passed_s: float) -> bool:
        if before.keys() != now.keys():
            return True  # a compiler has come or gone
        share = min(COMPUTES_SHARE, COMPUTES_OF_FAIR / max(self._crowd(), 1.0))
        enough_s = max(_SMALLEST_S, share * passed_s)
        return any(used_s - before[pid] > enough_s for pid, used_s in now.items())


def crowd_per_core() -> float:
    """How many processes want each core of this machine, over the last minute."""
    return os.getloadavg()[0] / (os.cpu_count() or 1)


def cpu_used_s(processes: Sequence[psutil.Process]) -> dict[int, float]:
    """Time that processes have spent on cores, by id; those included that compile for them."""
    used_s: dict[int, float] = {}
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            for member in (process, *process.children(recursive=True)):
                times = member.cpu_times()
                used_s[member.pid] = times.user + times.system
    return used_s
