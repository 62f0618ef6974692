"""Drafter training as the loop sees it: a protocol, and `Off` for runs that train no drafter.

step:   open_phase ── generation ── end_generation, observe ── update ── train_inline ── close_phase ── switch ── sync
        ── publish
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

from paceline.drafters.provenance import Provenance
from paceline.orchestrator.fleet import Lessor
from paceline.orchestrator.journal import Journal
from paceline.types import Group


class OnlineDrafter(Lessor, Protocol):
    """Trains the drafter beside the run. The loop calls it between its stages, and the fleet reports to it."""

    def running(self, journal: Journal) -> AbstractAsyncContextManager[None]:
        """Hold whatever training needs for as long as the context lasts."""
        ...

    def open_phase(self) -> None:
        """Rollouts begin: from now on idle engines' devices may be leased."""
        ...

    async def end_generation(self) -> None:
        """Rollouts are done: return when the learner has its devices to itself."""
        ...

    async def observe(self, groups: Sequence[Group], generation_s: float) -> None:
        """Learn from one step's rollouts how well the drafter does."""
        ...

    async def train_inline(self) -> None:
        """Train after the policy update while engines wait, if the config says so."""
        ...

    async def close_phase(self) -> None:
        """Weights come next: return when every engine is awake."""
        ...

    async def switch(self, steps_left: int) -> bool:
        """Start engines that draft from history again with the learned drafter, if it pays within the steps that are
        left; whether they were. They are idle, and the policy's sync comes next."""
        ...

    async def publish(self, *, restarted: bool) -> None:
        """The policy was synced: push a drafter that was judged better. `restarted` engines need the last one again."""
        ...

    def metrics(self) -> Mapping[str, float]:
        """Metrics of the step since the last call."""
        ...

    def keep_in(self, file: Path) -> None:
        """Copy every published drafter to this file, which survives a crash of the run."""
        ...

    def save_state(self, directory: Path) -> Mapping[str, Any]:
        """Copy files that training needs to go on into a new directory, and return the rest of what it needs."""
        ...

    def load_state(self, state: Mapping[str, Any], directory: Path) -> None:
        """Go on from what `save_state` kept; called before `running`."""
        ...

    def save(self, directory: Path, provenance: Provenance | None = None) -> None:
        """Write the drafter that the engines have as a checkpoint, if the run has trained one."""
        ...


class Off:
    """No drafter is trained: engines are always awake, and there is nothing to publish or to save."""

    def on_work(self, engine: str) -> None:
        return

    def on_drained(self, engine: str) -> None:
        return

    async def awake(self, engine: str) -> None:
        return

    def running(self, journal: Journal) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    def open_phase(self) -> None:
        return

    async def end_generation(self) -> None:
        return

    async def observe(self, groups: Sequence[Group], generation_s: float) -> None:
        return

    async def train_inline(self) -> None:
        return

    async def close_phase(self) -> None:
        return

    async def switch(self, steps_left: int) -> bool:
        return False

    async def publish(self, *, restarted: bool) -> None:
        return

    def metrics(self) -> Mapping[str, float]:
        return {}

    def keep_in(self, file: Path) -> None:
        return

    def save_state(self, directory: Path) -> Mapping[str, Any]:
        return {}

    def load_state(self, state: Mapping[str, Any], directory: Path) -> None:
        return

    def save(self, directory: Path, provenance: Provenance | None = None) -> None:
        return
