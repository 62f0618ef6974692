"""Online drafter training: lease idle engines' devices, close rounds, publish better drafters.

    loop ── open_phase … close_phase ──▶ Slots (slots.py) ──▶ engines sleep and wake, trainers take turns with them
     │                                                             │
     │                                     DrafterStore ◀── states, verdicts ──┘
     │                                          │
     └─── publish, after the policy's sync ◀────┘     drift.py decides when, and detects a lost drafter

Engines wait only for recalls. Training and judging use leased time. Closing a round renames the file of a single
trainer, or averages the files of several. Failures are counted, recorded once as an event, and cost drafter progress
only: the fleet continues with its drafter. Each failure is retried at the next step; several in a row end training. All
waits of the loop have deadlines.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

from paceline.config import DrafterTrainingConfig
from paceline.drafters.drift import DriftMonitor, LostDrafter, Remedy, Verdict
from paceline.drafters.failures import MAX_FAILURES, Failures
from paceline.drafters.provenance import Provenance
from paceline.orchestrator.drafter_switch import NoSwitch
from paceline.orchestrator.journal import Journal, clock_s
from paceline.orchestrator.leases import LEASE_S, Account
from paceline.orchestrator.members import Members
from paceline.orchestrator.online_drafter import OnlineDrafter
from paceline.orchestrator.slots import Slots, Trainer
from paceline.types import Engine, Group, Receipt

_LOOK_AGAIN_S = 0.02


class DrafterStore(Protocol):
    """Training data and rounds of the drafter, shared with the trainers."""

    def has_documents(self) -> bool:
        """Return whether there is training data."""
        ...

    def round(self) -> int:
        """Return the number of the newest base; 0 is the initial drafter."""
        ...

    def published(self) -> int:
        """Return the number of the engines' base."""
        ...

    def fresh_tokens(self) -> int:
        """Return the tokens of all trainers in the current round."""
        ...

    def slices_made(self) -> bool:
        """Return whether every trainer has finished its slices for the newest policy."""
        ...

    def close_round(self) -> None:
        """Average the trainers' weights into the next base."""

    def verdict(self, number: int) -> Verdict | None:
        """Return a trainer's verdict on a base; None before it exists."""

    def publish(self, number: int) -> None:
        """Note that the engines have this base."""

    def revert(self) -> int:
        """Continue from the published base under a new number, which counts as published, and return the number."""
        ...

    def forget(self) -> None:
        """Remove bases before the newest, except the published one."""

    def training_s(self) -> float:
        """Return the seconds of all trainers since the run began."""
        ...

    def tokens_trained(self) -> int:
        """Return the tokens of all trainers since the run began."""
        ...

    def keep_in(self, file: Path) -> None:
        """Set the target of `keep`."""

    def copy_to(self, directory: Path) -> None:
        """Copy bases with their optimizer, verdicts and progress into a new directory."""

    def copy_from(self, directory: Path) -> None:
        """Restore the files of `copy_to`."""

    def keep(self, number: int) -> None:
        """Copy a base to the file of `keep_in`, which outlives the run."""

    def metrics(self) -> Mapping[str, float]: ...

    def close(self) -> None: ...

    def save(self, directory: Path, provenance: Provenance | None) -> None:
        """Write the published drafter and its provenance as a checkpoint."""


class DrafterSender(Protocol):
    async def send_drafter(self, number: int) -> Sequence[Receipt]:
        """Push this base of the store to every engine."""
        ...

    async def stop_speculation(self) -> None:
        """Stop speculation on every engine."""


class OnlineDrafterTraining(OnlineDrafter):
    """Train on idle engines' devices, or inline after every update."""

    def __init__(
        self,
        members: Members,
        trainers: Sequence[Trainer],
        sender: DrafterSender,
        store: DrafterStore,
        config: DrafterTrainingConfig,
        *,
        apart: Collection[str] = (),
        switch: NoSwitch | None = None,
    ) -> None:
        """`trainers` are in the order of the members. Engines in `apart` share no core or GPU with the learner, so
        their slots may be leased while it works. `switch` is for engines that begin with history."""
        self._members = members
        self._sender = sender
        self._store = store
        self._config = config
        self._apart = frozenset(apart)
        self._switch = switch or NoSwitch()
        self._slots = Slots(members, trainers, skip_short=config.mode == "idle")
        self._drift = DriftMonitor()
        self._lost = LostDrafter()
        self._judged = 0
        """Last round with a handled verdict."""
        self._off = False
        """Speculation is off for the rest of the run."""
        self._joined = False
        """An engine with the initial drafter has joined."""
        members.on_joined(self._note_joined)
        self._failures = Failures(
            lambda what, error: self._journal.event("drafter_training_failed", during=what, why=repr(error)),
            lambda what: self._journal.event("drafter_training_given_up", during=what, failures=MAX_FAILURES),
        )
        """After they are given up, training ends, and engines keep their drafter."""
        self._last_failures = 0
        self._last = Account()
        self._update_cost_s = 0.0

    @asynccontextmanager
    async def running(self, journal: Journal) -> AsyncGenerator[None]:
        self._journal = journal
        try:
            async with self._slots.running(journal):
                yield
        finally:
            with self._failures.contained("close"):
                self._store.close()

    def _note_joined(self, engine: Engine) -> None:
        self._joined = True

    def on_work(self, engine: str) -> None:
        self._slots.on_work(engine)

    def on_drained(self, engine: str) -> None:
        self._slots.on_drained(engine)

    async def awake(self, engine: str) -> None:
        await self._slots.awake(engine)

    async def leased(self, engine: str) -> None:
        """Wait until the engine's trainer has its device."""
        await self._slots.leased(engine)

    def open_phase(self) -> None:
        if self._config.mode == "idle":
            with self._failures.contained("open_phase"):
                self._slots.open(training_wanted=self._wanted())

    async def end_generation(self) -> None:
        """Stop the trainers that share devices with the learner. Engines wake while the learner works."""
        await self._slots.recall([name for name in self._slots.names if name not in self._apart], awake=False)

    async def close_phase(self) -> None:
        """Wake every engine, then close the round if enough was trained in it."""
        await self._slots.recall(self._slots.names, awake=True)
        if self._failures.given_up:
            return
        with self._failures.contained("close_round"):
            store = self._store
            if store.fresh_tokens() >= self._config.round_tokens and store.round() in (self._judged, store.published()):
                store.close_round()
                store.forget()
                self._slots.forgive_crashes()

    async def train_inline(self) -> None:
        """In mode `inline`, lease every slot for the configured time or number of slices."""
        with self._journal.stage("draft"), self._failures.contained("train_inline"):
            if self._config.mode != "inline" or not self._wanted():
                return
            began_s = clock_s()
            self._slots.open(training_wanted=True)
            if self._config.inline_slices is None:
                await asyncio.sleep(self._config.inline_s)
            else:
                async with asyncio.timeout(LEASE_S):
                    while not self._store.slices_made():
                        await asyncio.sleep(_LOOK_AGAIN_S)
            await self.close_phase()
            self._update_cost_s += clock_s() - began_s

    async def switch(self, steps_left: int) -> bool:
        with self._failures.contained("switch"):
            if await self._switch.attempt(steps_left, self._journal):
                self._lost.synced(self._switch.promised)
                return True
        return False

    async def publish(self, *, restarted: bool) -> None:
        """Push a drafter that was judged better. Restarted engines have the initial drafter and need the last one."""
        self._lost.synced()
        with self._failures.contained("publish_again"):
            restarted = restarted or self._joined
            if restarted and self._off:
                await self._sender.stop_speculation()
            elif restarted and self._store.published():
                await self._send(self._store.published(), None)
            self._joined = False
        with self._failures.contained("publish"):
            await self._publish_verdict()

    async def _publish_verdict(self) -> None:
        number = self._store.round()
        verdict = self._store.verdict(number)
        if self._off or self._failures.given_up or verdict is None or number == self._judged:
            return
        began_s = clock_s()
        sent = verdict.publish and await self._send(number, verdict.after)
        self._switch.promise(verdict.after if sent else verdict.before)
        self._judged = number
        self._update_cost_s += clock_s() - began_s
        fields = self._update_fields(number, verdict)
        if sent:
            self._store.keep(number)
            self._journal.event("drafter_published", **fields, publish_s=round(clock_s() - began_s, 4))
        else:
            self._journal.event("drafter_refused", **fields, why=verdict.why)
            if not verdict.after >= verdict.before:  # worse, or NaN: discard the round
                self._judged = self._store.revert()
        self._drift.note_update(verdict if sent else replace(verdict, publish=False), self._update_cost_s)
        self._update_cost_s = 0.0
        self._store.forget()

    async def observe(self, groups: Sequence[Group], generation_s: float) -> None:
        """Follow the accepted length, and react to a lost drafter."""
        with self._failures.contained("observe"):
            await self._observe(groups, generation_s)

    async def _observe(self, groups: Sequence[Group], generation_s: float) -> None:
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        verifications = sum(rollout.num_verifications for rollout in rollouts)
        accepted = sum(rollout.num_accepted for rollout in rollouts)
        if self._switch.on_history:
            self._switch.observe(rollouts, generation_s)
            return
        if self._off or not verifications:
            return
        self._drift.observe(1 + accepted / verifications, generation_s)
        remedy = self._lost.observe(num_verifications=verifications, num_accepted=accepted)
        if remedy is not Remedy.NONE:
            self._journal.event("drafter_lost", remedy=remedy.value)
        if remedy is Remedy.PUSH_AGAIN:
            await self._send(self._store.published(), None)
        elif remedy is Remedy.SPECULATION_OFF:
            self._off = True
            await self._sender.stop_speculation()

    def metrics(self) -> Mapping[str, float]:
        """Return the metrics since the last call, and record the use of slots."""
        found: Mapping[str, float] = {}
        with self._failures.contained("metrics"):
            found = self._metrics()
        failures, before = self._failures.num + self._slots.failures.num, self._last_failures
        self._last_failures = failures
        return {**found, "draft/failures": float(failures - before)}

    def _metrics(self) -> Mapping[str, float]:
        account, last = self._account(), asdict(self._last)
        step = {name: float(now - last[name]) for name, now in asdict(account).items() if name != "recall_s"}
        recalls, account.recall_s = account.recall_s, []
        self._last = replace(account, recall_s=[])
        self._journal.places(self._slots.take_spans())
        return {
            **self._drift.decide().metrics(),
            **self._switch.metrics(),
            **{f"draft/{name}": value for name, value in step.items()},
            "draft/idle_used": step["training_s"] / step["leasable_s"] if step["leasable_s"] > 0 else 0.0,
            "draft/recall_max_ms": 1000 * max(recalls, default=0.0),
            "draft/tokens_trained": float(self._store.tokens_trained()),
            "draft/round": float(self._store.round()),
            "draft/published_round": float(self._store.published()),
            **self._store.metrics(),
        }

    def keep_in(self, file: Path) -> None:
        self._store.keep_in(file)

    def save(self, directory: Path, provenance: Provenance | None = None) -> None:
        with self._failures.contained("save"):
            if self._store.published() or not self._switch.on_history:
                self._store.save(directory, provenance)

    def save_state(self, directory: Path) -> Mapping[str, Any]:
        self._store.copy_to(directory)
        return {
            "drift": self._drift.state(),
            "lost": self._lost.state(),
            "judged": self._judged,
            "off": self._off,
            "update_cost_s": self._update_cost_s,
            "switch": self._switch.state(),
        }

    def load_state(self, state: Mapping[str, Any], directory: Path) -> None:
        self._store.copy_from(directory)
        self._drift.restore(state["drift"])
        self._lost.restore(state["lost"])
        self._judged, self._off = state["judged"], state["off"]
        self._update_cost_s = state["update_cost_s"]
        self._switch.restore(state["switch"])

    def _account(self) -> Account:
        """Return the use of idle time since the run began."""
        self._slots.account.training_s = self._store.training_s()
        return self._slots.account

    def _wanted(self) -> bool:
        """Return whether there is training data and training pays."""
        worth_it = self._config.when == "always" or self._drift.decide().train
        if self._switch.on_history:
            worth_it = not self._switch.given_up
        return not self._off and not self._failures.given_up and self._store.has_documents() and worth_it

    def _update_fields(self, number: int, verdict: Verdict) -> dict[str, Any]:
        return {
            "round": number,
            "accepted_length_before": round(verdict.before, 4),
            "accepted_length_after": round(verdict.after, 4),
            "tokens_trained": self._store.tokens_trained(),
            "training_s": round(self._store.training_s(), 3),
            "gain_s": round(self._drift.worth_s(max(0.0, verdict.gain)), 4),
            "expected_gain_s": round(self._drift.decide().expected_gain_s, 4),
            "in_engines": not self._switch.on_history,
        }

    async def _send(self, number: int, promised: float | None) -> bool:
        """Push a base to every engine, twice if one refuses it; return whether all have it. Engines that draft from
        history get it when they switch."""
        if self._switch.on_history:
            self._store.publish(number)
            return True
        for _ in range(2):
            receipts = await self._sender.send_drafter(number)
            failed = [receipt for receipt in receipts if not receipt.ok]
            for receipt in failed:
                why = receipt.error or "fingerprints differ"
                self._journal.event("drafter_push_failed", engine=receipt.engine, round=number, why=why)
                if receipt.lost:
                    self._members.lose(receipt.engine, receipt.error or "lost during a push of the drafter")
            if all(receipt.lost for receipt in failed):
                self._store.publish(number)
                self._lost.synced(promised)
                return True
        return False
