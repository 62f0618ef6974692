"""Tells an engine that is frozen from one that is only busy, by whether its processes still compute.

A step may take long: a prefill of many thousand tokens, code that is compiled on its first use. No token comes then and
no call is answered, but a core works on it, or polls for the GPU. A process that was stopped, or whose threads wait for
each other, uses no core at all. So an engine that owes an answer is frozen when nothing was heard of it and its
processes have not used a core for `FROZEN_S`. What spins without getting anywhere is left to
`rollout.engine.progress_deadline_s`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import psutil

QUIET_S = 2.0
"""An answer may take this long before anybody looks at processes, which costs milliseconds."""
FROZEN_S = 8.0
ALIVE_CPU_S = 0.02
"""Less than that in FROZEN_S is what the background threads of a frozen process may use."""


class Pulse:
    """What one engine's processes have computed lately. The caller passes its clock in."""

    def __init__(self, used_s: Callable[[], float]) -> None:
        """`used_s` tells how long the engine's processes have used cores so far."""
        self._used_s = used_s
        self._since: tuple[float, float] | None = None
        """Since when they have used how much and not more; None while there is no reason to look."""

    def still_s(self, *, silent_s: float, now_s: float) -> float:
        """How long the engine has been frozen, if it owes an answer since `silent_s`; 0 while it shows any life. To be
        called every second or two."""
        if silent_s < QUIET_S:
            self._since = None
            return 0.0
        used_s = self._used_s()
        if self._since is None or abs(used_s - self._since[1]) > ALIVE_CPU_S:  # less: a process has ended
            self._since = (now_s, used_s)
        return now_s - self._since[0]


def cpu_used_s(processes: Sequence[psutil.Process]) -> float:
    """Time that processes have spent on cores, those included that compile for them."""
    used_s = 0.0
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            for member in (process, *process.children(recursive=True)):
                times = member.cpu_times()
                used_s += times.user + times.system
    return used_s
