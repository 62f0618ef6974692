"""Drafter training beside the run: lends the places of idle engines, closes rounds, publishes what came of them. No ray, no vllm.

    loop ── open_phase … close_phase ─▶ Leases (idle.py) ──orders──▶ engines: sleep, wake     trainers: lease, recall, kill
     │                                     ▲                                                        │
     │  fleet ── on_work, on_drained ──────┘            draft/exchange.py ◀── states, verdicts ─────┘
     │                                                       │
     └─── publish, after the policy's sync ◀── close_round ──┘        drift.py decides when, and notices a drafter that was lost

Engines wait for nothing here but a recall. Judging and training are done on lent time; closing a round is a rename where one worker
has trained, and a mean of files where several have. Whatever fails on this side is an event in the metrics and costs the drafter's
progress: the fleet goes on with the drafter that it has.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from paceline.config import SpeculationConfig
from paceline.draft.drift import DriftWatch, LostDrafter, Remedy, Verdict
from paceline.draft.exchange import Exchange, drafter_weights
from paceline.draft.provenance import Provenance, write_evaluation, write_provenance
from paceline.draft.saver import Saver
from paceline.draft.worker import documents_in, rounds_in
from paceline.run.idle import Account, Action, Event, Leases, Order, State
from paceline.run.journal import Journal
from paceline.types import Engine, EngineLostError, Group, Receipt

_MOST_CRASHES = 3
"""Of one place's trainers in a row, without a round closed in between: then something is wrong that a new one does not mend."""
_ACCOUNTED = ("leasable_s", "leased_s", "training_s", "num_leases", "num_recalls", "num_kills", "num_crashes")
_AWAKE = (State.BUSY, State.IDLE, State.LOST)
_SPANS = {State.BUSY: "generate", State.LEASED: "train", State.RECALLED: "waking", State.WAKING: "waking", State.ROUSED: "waking"}


class Trainer(Protocol):
    """The training process beside one engine. Calls raise EngineLostError when the place is gone, engine and all."""

    async def start(self) -> None: ...

    async def ready(self) -> bool:
        """Wait until it could train; False if it ended before."""
        ...

    async def lease(self) -> None: ...

    async def recall(self) -> None:
        """Returns when it holds nothing that the engine needs."""
        ...

    async def kill(self) -> None: ...

    async def ended(self) -> str:
        """Wait for its end; says how it ended."""
        ...


class DrafterSender(Protocol):
    async def send_drafter(self, file: Path, version: int) -> Sequence[Receipt]:
        """Push the drafter's weights in `file` (a base of the exchange, or a checkpoint) to every engine."""
        ...

    async def stop_speculation(self) -> None:
        """No engine drafts any more."""
        ...


class Coach:
    """For one run. `conduct` is its lifetime; the fleet reports to it, and the loop calls it between its stages."""

    def __init__(
        self,
        engines: Sequence[Engine],
        trainers: Sequence[Trainer],
        sender: DrafterSender,
        config: SpeculationConfig,
        *,
        checkpoint: Path,
        directory: Path,
        apart: Collection[str] = (),
    ) -> None:
        """`checkpoint` is the drafter that the run begins with, `directory` what learner and trainers share. The engines named in
        `apart` share no core or GPU with the learner: they may be lent while it works."""
        self._engines = {engine.name: engine for engine in engines}
        self._trainers = dict(zip(self._engines, trainers, strict=True))
        self._sender = sender
        self._config = config.training
        self._max_draft_length = config.max_draft_length
        self._checkpoint = checkpoint
        self._directory = directory
        self._apart = frozenset(apart)
        self._exchange = Exchange(rounds_in(directory), checkpoint)
        self._leases = Leases(list(self._engines), self._config.lease)
        self._watch = DriftWatch(self._config.drift)
        self._lost = LostDrafter()
        self._judged = 0
        """Round whose verdict was carried out."""
        self._crashes = dict.fromkeys(self._engines, 0)
        self._off = False
        self.lends = True
        """Public: a bench holds it back for a step."""
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._spans: list[tuple[str, str, float, float]] = []
        self._span_began: dict[str, tuple[str, float]] = {}
        self._last = Account()
        self._update_cost_s = 0.0
        self._saver: Saver | None = None

    def keep_in(self, file: Path) -> None:
        """Leave what is published in this file as well, written beside the run: the shared directory goes with a crash."""
        self._saver = Saver(file)

    @asynccontextmanager
    async def conduct(self, journal: Journal, lose: Callable[[str, str], None]) -> AsyncIterator[None]:
        """Start the trainers and keep their leases; `lose` takes an engine out of the fleet."""
        self._journal, self._lose = journal, lose
        self._span_began = dict.fromkeys(self._engines, ("idle", _now_s()))
        self._spawn(self._keep_time())
        # Before the run begins: in it, a trainer that is starting gets only what nobody else wants.
        await asyncio.gather(*(self._start(engine) for engine in self._engines))
        try:
            yield
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await asyncio.gather(*(trainer.kill() for trainer in self._trainers.values()), return_exceptions=True)
            if self._saver is not None:
                self._saver.close()

    # ── what the fleet reports

    def on_work(self, engine: str) -> None:
        self._event(engine, Event.WORK)

    def on_drained(self, engine: str) -> None:
        self._event(engine, Event.DRAINED)

    def on_lost(self, engine: str) -> None:
        self._event(engine, Event.LOST)

    async def awake(self, engine: str) -> None:
        """Wait until the engine can take rollouts."""
        while self._leases.state(engine) not in _AWAKE:
            await self._changed.wait()

    async def leased(self, engine: str) -> None:
        """Wait until a trainer has its place."""
        while self._leases.state(engine) is not State.LEASED:
            await self._changed.wait()

    # ── what the loop calls

    def open_phase(self) -> None:
        """Rollouts begin: engines that run out of them are lent, if the drafter is worth training."""
        if self._config.mode == "idle" and self.lends:
            self._open(training_wanted=self._wanted())

    async def end_generation(self) -> None:
        """Rollouts are done: what the learner needs is given back. Engines that stand apart from it may be lent on."""
        await self._recall([engine for engine in self._engines if engine not in self._apart])

    async def close_phase(self) -> None:
        """Weights come next. Returns when every engine is awake; then closes the round if enough was trained in it."""
        await self._recall(list(self._engines))
        if self._exchange.fresh_tokens() >= self._config.round_tokens and self._exchange.round() in (self._judged, self._published):
            self._exchange.close_round()
            self._exchange.forget(but=self._published)
            self._crashes = dict.fromkeys(self._engines, 0)

    async def inline(self) -> None:
        """In mode `inline`: lend every place for as long as the config says, after the policy update."""
        if self._config.mode != "inline" or not self._wanted():
            return
        began_s = _now_s()
        self._open(training_wanted=True)
        await asyncio.sleep(self._config.inline_s)
        await self.close_phase()
        self._update_cost_s += _now_s() - began_s

    async def publish(self, *, restarted: bool = False) -> None:
        """After the policy's sync: send out a drafter that was found better. Engines that were restarted have the first one again
        and get the last that was published."""
        self._lost.synced()
        if restarted and self._published and not self._off:
            await self._send(self._published, None)
        number = self._exchange.round()
        verdict = self._exchange.verdict(number)
        if self._off or verdict is None or number == self._judged:
            return
        self._judged = number
        began_s = _now_s()
        sent = verdict.publish and await self._send(number, verdict.after)
        self._update_cost_s += _now_s() - began_s
        fields = self._update_fields(number, verdict)
        if sent:
            if self._saver is not None:
                self._saver.save(drafter_weights(self._exchange.file(number)), step=number)
            self._journal.event("drafter_published", **fields, publish_s=round(_now_s() - began_s, 4))
        else:
            self._journal.event("drafter_refused", **fields, why=verdict.why)
            if not verdict.after >= verdict.before:  # worse, or no number: what was learnt goes
                self._judged = self._exchange.revert(self._published)
                self._exchange.publish(self._judged)
        self._watch.note_update(verdict if sent else replace(verdict, publish=False), self._update_cost_s)
        self._update_cost_s = 0.0
        self._exchange.forget(but=self._published)

    async def observe(self, groups: Sequence[Group], generation_s: float) -> None:
        """Acceptance of one step's rollouts."""
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        verifications = sum(rollout.num_verifications for rollout in rollouts)
        accepted = sum(rollout.num_accepted for rollout in rollouts)
        if self._off or not verifications:
            return
        self._watch.observe(1 + accepted / verifications, generation_s)
        remedy = self._lost.observe(num_verifications=verifications, num_accepted=accepted)
        if remedy is not Remedy.NONE:
            self._journal.event("drafter_lost", remedy=remedy.value)
        if remedy is Remedy.PUSH_AGAIN:
            await self._send(self._published, None)
        elif remedy is Remedy.SPECULATION_OFF:
            self._off = True
            await self._sender.stop_speculation()

    def metrics(self) -> dict[str, float]:
        """Of the step since the last call; writes the step's spans."""
        account, last = self.account(), self._last
        step = {name: float(getattr(account, name) - getattr(last, name)) for name in _ACCOUNTED}
        recalls = account.recall_s[len(last.recall_s) :]
        self._last = replace(account, recall_s=list(account.recall_s))
        for engine in self._engines:
            self._cut_span(engine)
        self._journal.places(self._spans)
        self._spans = []
        return (
            self._watch.decide().metrics()
            | {f"draft/{name}": value for name, value in step.items()}
            | {"draft/idle_used": step["training_s"] / step["leasable_s"] if step["leasable_s"] > 0 else 0.0}
            | {"draft/recall_max_ms": 1000 * max(recalls, default=0.0)}
            | {"draft/tokens_trained": float(self._tokens_trained())}
            | {"draft/round": float(self._exchange.round()), "draft/published_round": float(self._published)}
            | ({} if self._saver is None else self._saver.counts().metrics())
        )

    def account(self) -> Account:
        """Since the beginning."""
        self._leases.account.training_s = sum(self._exchange.progress(name).training_s for name in self._engines)
        return self._leases.account

    def save(self, directory: Path, provenance: Provenance | None = None) -> None:
        """Write the drafter that the engines have as a checkpoint of its own, with what is known about it: how it does on the
        held-out slice, and `provenance`, to which the tokens that were trained on are added."""
        import torch

        from paceline.draft.buffer import Buffer
        from paceline.draft.checkpoint import load, save
        from paceline.draft.trainer import evaluate, load_weights

        drafter = load(self._checkpoint)
        load_weights(drafter, self._exchange.base(self._published))
        save(drafter, directory, tokenizer=self._checkpoint / "tokenizer.json")
        if provenance is not None:
            write_provenance(directory, replace(provenance, num_tokens=provenance.num_tokens + self._tokens_trained()))
        buffer = Buffer(documents_in(self._directory), self._config.buffer)
        documents, head = buffer.heldout(self._config.drift.heldout_tokens), buffer.head()
        if documents and head is not None:
            head_VD = torch.from_numpy(head[1].copy())
            write_evaluation(directory, evaluate(drafter, documents, head_VD, draft_length=self._max_draft_length))

    # ── the rest

    @property
    def _published(self) -> int:
        return self._exchange.published()

    def _tokens_trained(self) -> int:
        """By all workers since the beginning."""
        return sum(self._exchange.progress(name).num_tokens for name in self._engines)

    def _wanted(self) -> bool:
        has_documents = any(documents_in(self._directory).glob("*.head"))
        return has_documents and not self._off and (self._config.when == "always" or self._watch.decide().train)

    def _update_fields(self, number: int, verdict: Verdict) -> dict[str, Any]:
        decision = self._watch.decide()
        return {
            "round": number,
            "accepted_length_before": round(verdict.before, 4),
            "accepted_length_after": round(verdict.after, 4),
            "tokens_trained": self._tokens_trained(),
            "training_s": round(self.account().training_s, 3),
            "gain_s": round(self._watch.worth_s(max(0.0, verdict.gain)), 4),
            "expected_gain_s": round(decision.expected_gain_s, 4),
        }

    async def _send(self, number: int, promised: float | None) -> bool:
        """Push a base to every engine, twice if it must be; whether all have it."""
        for _ in range(2):
            receipts = await self._sender.send_drafter(self._exchange.file(number), number)
            failed = [receipt for receipt in receipts if not receipt.ok]
            for receipt in failed:
                self._journal.event(
                    "drafter_push_failed", engine=receipt.engine, round=number, why=receipt.error or "fingerprints differ"
                )
                if receipt.lost:
                    self._lose(receipt.engine, receipt.error or "lost during a push of the drafter")
            if all(receipt.lost for receipt in failed):
                self._exchange.publish(number)
                self._lost.synced(promised)
                return True
        return False

    async def _recall(self, engines: Sequence[str]) -> None:
        self._carry_out_all(self._leases.announce(now_s=_now_s(), phase_open=False, engines=engines))
        for engine in engines:
            await self.awake(engine)

    def _open(self, *, training_wanted: bool) -> None:
        self._carry_out_all(self._leases.announce(now_s=_now_s(), phase_open=True, training_wanted=training_wanted))

    def _event(self, engine: str, event: Event, *, lease: int | None = None) -> None:
        self._carry_out_all(self._leases.on(engine, event, _now_s(), lease=lease))

    def _carry_out_all(self, orders: Sequence[Order]) -> None:
        for engine in self._engines:
            if self._span_began[engine][0] != _SPANS.get(self._leases.state(engine), "idle"):
                self._cut_span(engine)
        for engine, action in orders:
            self._spawn(self._carry_out(engine, action))
        self._changed.set()
        self._changed = asyncio.Event()

    async def _carry_out(self, engine: str, action: Action) -> None:
        trainer, lease = self._trainers[engine], self._leases.lease(engine)
        try:
            match action:
                case Action.SLEEP:
                    await self._engines[engine].sleep()
                    self._event(engine, Event.SLEPT)
                case Action.WAKE:
                    await self._engines[engine].wake()
                    self._event(engine, Event.AWAKE)
                case Action.OFFER:
                    if await trainer.ready():
                        self._event(engine, Event.READY)
                case Action.REPLACE:
                    if await self._replace(engine):
                        self._event(engine, Event.READY)
                case Action.LEASE:
                    await trainer.lease()
                case Action.RECALL:
                    await trainer.recall()
                    self._event(engine, Event.STOPPED, lease=lease)
                case Action.KILL:
                    await trainer.kill()
        except EngineLostError as lost:
            self._lose(engine, lost.why)

    async def _start(self, engine: str) -> bool:
        """Whether the place has a trainer that could train; its end, whenever it comes, is looked after."""
        try:
            await self._trainers[engine].start()
            self._spawn(self._await_end(engine))
            return await self._trainers[engine].ready()
        except EngineLostError as lost:
            self._lose(engine, lost.why)
            return False

    async def _replace(self, engine: str) -> bool:
        self._crashes[engine] += 1
        if self._crashes[engine] > _MOST_CRASHES:
            self._journal.event("trainer_given_up", engine=engine, crashes=self._crashes[engine])
            return False
        return await self._start(engine)

    async def _await_end(self, engine: str) -> None:
        try:
            why = await self._trainers[engine].ended()
        except EngineLostError as lost:
            self._lose(engine, lost.why)
            return
        self._journal.event("trainer_lost", engine=engine, why=why)
        self._event(engine, Event.CRASHED)

    async def _keep_time(self) -> None:
        while True:
            changed, due_s = self._changed, self._leases.next_due_s()
            try:
                await asyncio.wait_for(changed.wait(), None if due_s is None else max(0.0, due_s - _now_s()))
            except TimeoutError:
                assert due_s is not None
                # A clock may stand a rounding error before what it was to wait for.
                self._carry_out_all(self._leases.due(max(_now_s(), due_s)))

    def _cut_span(self, engine: str) -> None:
        label, began_s = self._span_began[engine]
        now_s = _now_s()
        if now_s > began_s:
            self._spans.append((engine, label, began_s, now_s))
        self._span_began[engine] = (_SPANS.get(self._leases.state(engine), "idle"), now_s)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
