"""Times of an engine on another machine, told on the driver's clock.

A monotonic clock counts from its machine's boot, so times of two machines cannot be compared. The driver asks an engine
for its time now and then, and takes the answer to be from the middle of the wait. The quickest of the last answers
counts: it was off by half its wait at most.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from pathlib import Path

from paceline.types import DraftBin, Rollout

_NUM_ANSWERS = 16


def this_machine() -> str:
    """Names the boot of this machine, which containers on it share as they share its monotonic clock."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


class RemoteClock:
    """The clock of one engine's machine. It counts as the driver's own until an answer from another machine comes."""

    def __init__(self) -> None:
        self._answers: deque[tuple[float, float]] = deque(maxlen=_NUM_ANSWERS)
        """How long each answer took, and how far this clock was ahead of the other."""

    @property
    def is_shared(self) -> bool:
        return not self._answers

    @property
    def ahead_s(self) -> float:
        """What has to be added to a time of the engine."""
        return min(self._answers)[1] if self._answers else 0.0

    def compare(self, machine: str, *, asked_s: float, theirs_s: float, answered_s: float) -> None:
        """Take an answer into account; one from this machine says nothing that is not known."""
        if machine != this_machine():
            self._answers.append((answered_s - asked_s, (asked_s + answered_s) / 2 - theirs_s))

    def rollout(self, rollout: Rollout) -> Rollout:
        if self.is_shared:
            return rollout
        ahead_s = self.ahead_s
        return replace(rollout, started_s=rollout.started_s + ahead_s, finished_s=rollout.finished_s + ahead_s)

    def draft_bin(self, item: DraftBin) -> DraftBin:
        return item if self.is_shared else replace(item, begin_s=item.begin_s + self.ahead_s)
