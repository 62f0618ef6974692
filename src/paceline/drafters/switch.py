"""Decides when engines that draft from history are started again with the drafter that the run trains. Pure logic.

A run without a learned drafter drafts from history while it trains one from nothing. The two are compared by the tokens
that an engine gets for the time of one pass of the policy:

    history   tokens / passes, of the last steps' rollouts; a lookup costs next to nothing
    learned   the most that any draft length k gives: (1 + a + ... + a^k) / (1 + what k drafts cost)

where `a` follows from the drafter's accepted length on the held-out slice. A pass costs what it reads: a drafter's pass
has the share of the policy's that its weights have, which is not measured. Over the steps that are left a switch saves

    gain_s = generation_s x (1 - history / learned) x steps_left

and it pays if that is more than two starts of an engine, as they were measured in this run: the switch is one, and a
drafter that no engine starts with costs another one back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.drafters.drift import RECENT

_STARTS = 2
_FOLLOWED = ("history", "generation_s", "promised")


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchDecision:
    """Whether to switch, with the figures that decided."""

    switch: bool
    why: str
    gain_s: float = 0.0
    cost_s: float = 0.0

    def metrics(self) -> dict[str, float]:
        return {"draft/switch_gain_s": self.gain_s, "draft/switch_cost_s": self.cost_s}


def decide_switch(
    *, history: float | None, learned: float | None, generation_s: float, steps_left: int, start_s: float
) -> SwitchDecision:
    """`history` and `learned` are tokens for the time of a pass, None before they are known; `start_s` is the time of
    an engine's start."""
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
    """Tokens for the time of a pass at the best draft length. `accepted_length` is that of the largest, and `costs_K`
    the time of 0, 1, ... drafts in passes of the policy. Every draft is taken to be accepted as often as the others."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if _tokens(middle, len(costs_K) - 1) < accepted_length else (low, middle)
    return max(_tokens(low, k) / (1 + cost) for k, cost in enumerate(costs_K))


def _tokens(acceptance: float, k: int) -> float:
    return sum(acceptance**j for j in range(k + 1))


class SwitchMonitor:
    """Follows what history gives and what the trained drafter promises, in one run."""

    def __init__(self, costs_K: Sequence[float]) -> None:
        self._costs_K = costs_K
        self._history: float | None = None
        self._generation_s = 0.0
        self._promised: float | None = None

    @property
    def promised(self) -> float | None:
        """Accepted length of the published drafter on the held-out slice."""
        return self._promised

    def state(self) -> dict[str, float | None]:
        return {name: getattr(self, f"_{name}") for name in _FOLLOWED}

    def restore(self, state: Mapping[str, float | None]) -> None:
        for name in _FOLLOWED:
            setattr(self, f"_{name}", state[name])

    def observe(self, *, num_tokens: int, num_accepted: int, generation_s: float) -> None:
        """Take in the rollouts of one step that engines drafted for from history, and the time of their phase."""
        if num_tokens <= num_accepted:
            return
        rate = num_tokens / (num_tokens - num_accepted)
        first = self._history is None
        self._history = rate if self._history is None else self._history + RECENT * (rate - self._history)
        self._generation_s += (generation_s - self._generation_s) * (1.0 if first else RECENT)

    def promise(self, accepted_length: float) -> None:
        """Take in what the held-out slice says of the published drafter now."""
        self._promised = accepted_length

    def decide(self, *, steps_left: int, start_s: float) -> SwitchDecision:
        return decide_switch(
            history=self._history,
            learned=None if self._promised is None else best_rate(self._promised, self._costs_K),
            generation_s=self._generation_s,
            steps_left=steps_left,
            start_s=start_s,
        )
