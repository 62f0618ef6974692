"""Decide when to restart engines that draft from history with the drafter that the run trains.

Both are compared by tokens per time of one forward pass of the policy:

    history   tokens / passes in the rollouts of the last steps; a lookup costs next to nothing
    learned   the best of all draft lengths k: (1 + a + ... + a^k) / (1 + cost of k drafts)

where `a` follows from the drafter's accepted length on the held-out slice. Over the remaining steps a switch saves

    gain_s = generation_s x (1 - history / learned) x steps_left

It pays if that exceeds two measured engine starts: the switch takes one, and returning from a drafter that fails to
start takes another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.drafters.drift import RECENT

_STARTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchDecision:
    """Decision to switch, with its figures."""

    switch: bool
    why: str
    gain_s: float = 0.0
    cost_s: float = 0.0

    def metrics(self) -> dict[str, float]:
        return {"draft/switch_gain_s": self.gain_s, "draft/switch_cost_s": self.cost_s}


def decide_switch(
    *, history: float | None, learned: float | None, generation_s: float, steps_left: int, start_s: float
) -> SwitchDecision:
    """Decide on a switch. `history` and `learned` are tokens per time of a pass, None while unknown; `start_s` is the
    time of an engine start."""
    cost_s = _STARTS * start_s
    if history is None or learned is None:
        return SwitchDecision(switch=False, why="nothing measured yet", cost_s=cost_s)
    if not learned > history:  # also for NaN
        return SwitchDecision(switch=False, why="history drafts as well", cost_s=cost_s)
    gain_s = generation_s * (1 - history / learned) * steps_left
    pays = gain_s > cost_s
    why = "gain exceeds cost" if pays else "cost exceeds gain"
    return SwitchDecision(switch=pays, why=why, gain_s=gain_s, cost_s=cost_s)


def best_rate(accepted_length: float, costs_K: Sequence[float]) -> float:
    """Return the tokens per time of a pass at the best draft length.

    `accepted_length` is measured at the longest draft length, and all drafts are assumed to be accepted equally often.
    `costs_K` is the time of 0, 1, ... drafts in passes of the policy.
    """
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if _tokens(middle, len(costs_K) - 1) < accepted_length else (low, middle)
    return max(_tokens(low, k) / (1 + cost) for k, cost in enumerate(costs_K))


def _tokens(acceptance: float, k: int) -> float:
    return sum(acceptance**j for j in range(k + 1))


class SwitchMonitor:
    """Drafting from history and from the trained drafter in one run."""

    def __init__(self, costs_K: Sequence[float]) -> None:
        self._costs_K = costs_K
        self._history: float | None = None
        """Smoothed tokens per pass of drafting from history."""
        self._generation_s = 0.0
        self.promised: float | None = None
        """Accepted length of the published drafter on the held-out slice."""

    def state(self) -> dict[str, Any]:
        return {"history": self._history, "generation_s": self._generation_s, "promised": self.promised}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._history, self._generation_s = state["history"], state["generation_s"]
        self.promised = state["promised"]

    def observe(self, *, num_tokens: int, num_accepted: int, generation_s: float) -> None:
        """Add the rollouts of one step that were drafted from history, and the time of their phase."""
        if num_tokens <= num_accepted:
            return
        rate = num_tokens / (num_tokens - num_accepted)
        if self._history is not None:
            rate = self._history + RECENT * (rate - self._history)
            generation_s = self._generation_s + RECENT * (generation_s - self._generation_s)
        self._history, self._generation_s = rate, generation_s

    def promise(self, accepted_length: float) -> None:
        self.promised = accepted_length

    def decide(self, *, steps_left: int, start_s: float) -> SwitchDecision:
        return decide_switch(
            history=self._history,
            learned=None if self.promised is None else best_rate(self.promised, self._costs_K),
            generation_s=self._generation_s,
            steps_left=steps_left,
            start_s=start_s,
        )
