"""Switch from history to the learned drafter in a run that began without one.

    a step's rollouts, verdicts on trained drafters ──▶ SwitchMonitor (drafters/switch.py): does it pay?
    between two batches ──▶ restart engines with the learned drafter ──▶ sync of the policy ──▶ published drafter

All engines switch or none. If one fails to start, all restart with history, `draft/failures` counts it, and the run
drafts from history to its end. A run that resumes after its switch switches at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from paceline.drafters.switch import SwitchDecision, SwitchMonitor
from paceline.orchestrator.journal import Journal, clock_s
from paceline.types import Rollout


class DraftingEngines(Protocol):
    """The engines of a run, which can restart with another drafter."""

    @property
    def start_s(self) -> float:
        """Duration of the slowest engine's last start."""
        ...

    async def draft_with(self, *, learned: bool) -> None:
        """Restart all idle engines with the learned drafter or with history; a push of the policy must follow. Raise
        if one does not start."""


class NoSwitch:
    """For engines that start with the learned drafter."""

    on_history = False
    """Engines draft from history."""
    given_up = False
    """No switch is attempted any more."""

    @property
    def promised(self) -> float | None:
        """Accepted length of the published drafter on the held-out slice."""
        return None

    def observe(self, rollouts: Sequence[Rollout], generation_s: float) -> None:
        """Add one step's rollouts, drafted from history."""

    def promise(self, accepted_length: float) -> None:
        """Note the published drafter's accepted length on the held-out slice."""

    async def attempt(self, steps_left: int, journal: Journal) -> bool:
        """Switch if it pays. Return whether engines switched; raise if the switch failed."""
        return False

    def metrics(self) -> Mapping[str, float]:
        return {}

    def state(self) -> Mapping[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state, while engines draft from history."""


class DrafterSwitch(NoSwitch):
    """Draft from history until the learned drafter pays for a restart."""

    def __init__(self, engines: DraftingEngines, monitor: SwitchMonitor) -> None:
        self._engines = engines
        self._monitor = monitor
        self._decision = SwitchDecision(switch=False, why="nothing measured yet")
        self._is_due = False
        """The run switched before it was interrupted."""
        self.on_history = True
        self.given_up = False

    @property
    def promised(self) -> float | None:
        return self._monitor.promised

    def observe(self, rollouts: Sequence[Rollout], generation_s: float) -> None:
        self._monitor.observe(
            num_tokens=sum(len(rollout.token_ids) for rollout in rollouts),
            num_accepted=sum(rollout.num_accepted for rollout in rollouts),
            generation_s=generation_s,
        )

    def promise(self, accepted_length: float) -> None:
        self._monitor.promise(accepted_length)

    async def attempt(self, steps_left: int, journal: Journal) -> bool:
        if not self.on_history or self.given_up:
            return False
        self._decision = self._monitor.decide(steps_left=steps_left, start_s=self._engines.start_s)
        if not (self._decision.switch or self._is_due):
            return False
        began_s = clock_s()
        try:
            await self._engines.draft_with(learned=True)
        except Exception:
            self.given_up = True
            with suppress(Exception):  # the next push loses an engine that does not return
                await self._engines.draft_with(learned=False)
            raise
        self.on_history = False
        spent_s = clock_s() - began_s
        why = "resumed after a switch" if self._is_due else self._decision.why
        gain_s, cost_s = round(self._decision.gain_s, 4), round(self._decision.cost_s, 4)
        journal.event("drafter_switched", why=why, expected_gain_s=gain_s, cost_s=cost_s, restart_s=round(spent_s, 4))
        return True

    def metrics(self) -> Mapping[str, float]:
        if not self.on_history:
            return {"draft/learned": 1.0}
        return {"draft/learned": 0.0, "draft/decision": float(not self.given_up), **self._decision.metrics()}

    def state(self) -> Mapping[str, Any]:
        switched = not self.on_history or (self._is_due and not self.given_up)
        return {"monitor": self._monitor.state(), "switched": switched, "given_up": self.given_up}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._monitor.restore(state["monitor"])
        self._is_due, self.given_up = state["switched"], state["given_up"]
