"""Convert times of an engine on another machine to the driver's clock.

A monotonic clock counts from its machine's boot, so times of two machines are not comparable. The driver polls the
engine's time, and assumes that the answer is from the middle of the wait. The fastest recent answer is used: its error
is at most half its wait.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from pathlib import Path

from paceline.types import DraftBin, Rollout

_NUM_ANSWERS = 16


def this_machine() -> str:
    """Return the boot id of this machine, which its containers share like its monotonic clock."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


class RemoteClock:
    """The clock of one engine's machine, assumed to be the driver's until another machine answers."""

    def __init__(self) -> None:
        self._answers: deque[tuple[float, float]] = deque(maxlen=_NUM_ANSWERS)
        """Duration of each answer, and the lead of the driver's clock."""

    @property
    def is_shared(self) -> bool:
        return not self._answers

    @property
    def ahead_s(self) -> float:
        """Offset from the engine's time to the driver's."""
        return min(self._answers)[1] if self._answers else 0.0

    def compare(self, machine: str, *, asked_s: float, theirs_s: float, answered_s: float) -> None:
        """Add an answer; answers from this machine have no offset."""
        if machine != this_machine():
            self._answers.append((answered_s - asked_s, (asked_s + answered_s) / 2 - theirs_s))

    def rollout(self, rollout: Rollout) -> Rollout:
        if self.is_shared:
            return rollout
        ahead_s = self.ahead_s
        return replace(rollout, started_s=rollout.started_s + ahead_s, finished_s=rollout.finished_s + ahead_s)

    def draft_bin(self, item: DraftBin) -> DraftBin:
        return item if self.is_shared else replace(item, begin_s=item.begin_s + self.ahead_s)
