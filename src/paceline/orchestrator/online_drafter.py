"""Drafter training as the loop sees it. The base class trains no drafter.

step:   open_phase ── generation ── end_generation, observe ── update ── train_inline ── close_phase ── switch ── sync
        ── publish
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any

from paceline.drafters.provenance import Provenance
from paceline.orchestrator.journal import Journal
from paceline.types import Group


class OnlineDrafter:
    """Drafter training beside the run. The loop calls it between stages, and the fleet reports to it as its Lessor.

    Without training, engines are always awake.
    """

    def on_work(self, engine: str) -> None:
        return

    def on_drained(self, engine: str) -> None:
        return

    async def awake(self, engine: str) -> None:
        return

    def running(self, journal: Journal) -> AbstractAsyncContextManager[None]:
        """Run trainers inside the context."""
        return nullcontext()

    def open_phase(self) -> None:
        """Allow leases of idle engines' devices; rollouts begin."""

    async def end_generation(self) -> None:
        """Return when the learner has its devices to itself; rollouts are complete."""

    async def observe(self, groups: Sequence[Group], generation_s: float) -> None:
        """Add one step's rollouts to the estimate of the drafter's acceptance."""

    async def train_inline(self) -> None:
        """Train after the policy update while engines wait, if configured."""

    async def close_phase(self) -> None:
        """Return when every engine is awake for the weight push that follows."""

    async def switch(self, steps_left: int) -> bool:
        """Restart idle engines with the learned drafter if it pays within the remaining steps. Return whether they
        restarted; a sync of the policy follows."""
        return False

    async def publish(self, *, restarted: bool) -> None:
        """Push a drafter that was judged better, after a sync of the policy. `restarted` engines need the last one."""

    def metrics(self) -> Mapping[str, float]:
        """Return the metrics since the last call."""
        return {}

    def keep_in(self, file: Path) -> None:
        """Copy every published drafter to this file, which outlives the run."""

    def save_state(self, directory: Path) -> Mapping[str, Any]:
        """Copy the files of a checkpoint into a new directory, and return the rest of the state."""
        return {}

    def load_state(self, state: Mapping[str, Any], directory: Path) -> None:
        """Restore a checkpoint before `running`."""

    def save(self, directory: Path, provenance: Provenance | None = None) -> None:
        """Write the engines' drafter as a checkpoint, if the run has trained one."""
