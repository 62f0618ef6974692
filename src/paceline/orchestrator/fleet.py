"""Distribute rollouts over engines: prompts in, groups out, no rollout lost with an engine.

    open(prompts) ──▶ ledger ──assign──▶ outbox ──submit──▶ engine
         ▲              │  ▲                                  │
       batch ◀──group───┘  └──────complete──── collect ◀──────┘      (two tasks per engine: _submit and _collect)

The engine with the fewest rollouts gets the next one while it has room. The others wait here, longest expected first,
so that engines that finish early find work. While more rollouts wait than engines have room for, siblings go to one
engine, which reads their prompt once (ledger.py). Otherwise they are distributed in turn: siblings have similar
lengths, and no later work would balance the engines. Dispatch costs O(log engines).

Engines may join at any time. If all are lost, rollouts wait while an engine may return (members.py). A group with a
prompt that seems to kill engines is dropped (ledger.py), and its prompt is not sampled again.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from paceline.orchestrator.groups import Batch, GroupListener, Sampling
from paceline.orchestrator.ledger import Dropped, Ledger
from paceline.orchestrator.members import Members
from paceline.types import (
    Engine,
    EngineLostError,
    Group,
    GroupId,
    PacelineError,
    Prompt,
    Rollout,
    RolloutId,
    RolloutRequest,
)

LeavesListener = Callable[[str, str, int], None]
"""Called with a lost engine, the reason, and the number of its rollouts that other engines get."""
_MOST_LENGTHS = 2**16
"""Prompts with remembered lengths. Larger datasets repeat prompts too rarely to benefit."""


class Lessor(Protocol):
    """Lease idle engines' devices to others, and return them before rollouts start."""

    def on_work(self, engine: str) -> None:
        """Note that an idle engine got rollouts."""

    def on_drained(self, engine: str) -> None:
        """Note that the engine has finished all its rollouts and none wait."""

    async def awake(self, engine: str) -> None:
        """Wait until the engine can take rollouts."""


@dataclass(slots=True)
class _Mailbox:
    """Messages for one engine, and the two tasks that communicate with it."""

    engine: Engine
    outbox: list[RolloutRequest] = field(default_factory=list[RolloutRequest])
    aborts: list[RolloutId] = field(default_factory=list[RolloutId])
    mail: asyncio.Event = field(default_factory=asyncio.Event)
    work: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: list[asyncio.Task[None]] = field(default_factory=list[asyncio.Task[None]])


class Fleet:
    """An async context manager, which runs the tasks of all engines."""

    def __init__(
        self,
        members: Members,
        lessor: Lessor,
        *,
        max_in_flight: int,
        on_lost: LeavesListener,
        on_progress: Callable[[Batch], None] = lambda batch: None,
        on_quarantine: Callable[[Prompt], None] = lambda prompt: None,
    ) -> None:
        """`max_in_flight` bounds the rollouts of one engine. `on_quarantine` gets the prompt of each dropped group."""
        self.ledger = Ledger()
        self.members = members
        self._mailboxes = {engine.name: _Mailbox(engine) for engine in members.engines}
        self._entered = False
        self._quarantined: set[str] = set()
        self._lessor = lessor
        self._max_in_flight = max_in_flight
        self._on_lost = on_lost
        self._on_progress = on_progress
        self._on_quarantine = on_quarantine
        members.on_lost(self._redispatch)
        members.on_joined(self._welcome)
        members.on_hopeless(lambda: self._fail(PacelineError("every engine is lost, and none could be started again")))
        self._loads: list[tuple[int, int, str]] = []
        self._ties = 0
        self._closing: set[asyncio.Task[None]] = set()
        self._batches: dict[int, Batch] = {}
        self._batch_of: dict[GroupId, int] = {}
        self._next_batch = 0
        self._num_evaluated = 0
        self._mean_length: dict[str, float] = {}
        self._typical_length = 0.0

    @property
    def engines(self) -> list[Engine]:
        return self.members.engines

    async def __aenter__(self) -> Fleet:
        self._entered = True
        for mailbox in self._mailboxes.values():
            self._begin(mailbox)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._entered = False
        tasks = [task for mailbox in self._mailboxes.values() for task in mailbox.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._closing, return_exceptions=True)

    def open(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        group_ids: Sequence[GroupId] | None = None,
        places: Sequence[int] | None = None,
        listener: GroupListener | None = None,
    ) -> Batch:
        """Start sampling a batch, after older batches.

        A group's place, by default its index, seeds its rollouts. Without ids, groups get ids for evaluation.
        """
        batch_id, self._next_batch = self._next_batch, self._next_batch + 1
        if group_ids is None:
            first, self._num_evaluated = self._num_evaluated, self._num_evaluated + len(prompts)
            group_ids = [GroupId(first + index, purpose="eval") for index in range(len(prompts))]
        places = range(len(prompts)) if places is None else places
        batch = Batch(total=len(prompts) * sampling.group_size, group_ids=tuple(group_ids), listener=listener)
        self._batches[batch_id] = batch
        for place, group_id, prompt in zip(places, group_ids, prompts, strict=True):
            if prompt.id in self._quarantined:
                batch.total -= sampling.group_size
                self._on_quarantine(prompt)
                if listener is not None:
                    listener.on_dropped(group_id)
                continue
            self._batch_of[group_id] = batch_id
            requests = [
                RolloutRequest(
                    group_id=group_id,
                    index=index,
                    prompt_ids=prompt.token_ids,
                    max_tokens=sampling.max_tokens,
                    temperature=sampling.temperature,
                    seed=sampling.seed_of(place, index),
                )
                for index in range(sampling.group_size)
            ]
            expected = self._mean_length.get(prompt.id, self._typical_length)
            self.ledger.open(batch=batch_id, prompt=prompt, requests=requests, expected_length=expected)
        if self.members.hopeless:
            self._fail(PacelineError("every engine is lost"))
        self._finish_if_done(batch_id, batch)
        self._dispatch()
        return batch

    def abort(self, group_id: GroupId) -> None:
        """Abort an open group; rollouts that still arrive are discarded."""
        dropped = self.ledger.drop(group_id)
        for name, ids in dropped.assigned.items():
            mailbox = self._mailboxes[name]
            unsent = {request.id for request in mailbox.outbox}.intersection(ids)
            mailbox.outbox = [request for request in mailbox.outbox if request.id not in unsent]
            mailbox.aborts += [one for one in ids if one not in unsent]
            mailbox.mail.set()
            self._note_load(name)
        self._leave_out(dropped)
        self._dispatch()

    def _welcome(self, engine: Engine) -> None:
        mailbox = self._mailboxes[engine.name] = _Mailbox(engine)
        if self._entered:
            self._begin(mailbox)
            self._dispatch()

    def _begin(self, mailbox: _Mailbox) -> None:
        mailbox.tasks = [asyncio.create_task(self._guard(work(mailbox))) for work in (self._submit, self._collect)]
        self._note_load(mailbox.engine.name)

    def _redispatch(self, engine: str, why: str) -> None:
        """Give the rollouts of a lost engine to the others."""
        mailbox = self._mailboxes.pop(engine)
        for task in mailbox.tasks:
            if task is not asyncio.current_task():
                task.cancel()
        # A frozen engine still holds memory and cores.
        self._closing.add(closing := asyncio.create_task(mailbox.engine.close()))
        closing.add_done_callback(self._closing.discard)
        num_redispatched, dropped = self.ledger.lose(engine)
        self._on_lost(engine, why, num_redispatched)
        if dropped is not None:
            self._drop(dropped)
        if self.members.hopeless:
            self._fail(PacelineError(f"every engine is lost; the last was {engine}: {why}"))
        self._dispatch()

    def _drop(self, dropped: Dropped) -> None:
        """Exclude a prompt that seems to kill engines from its batch and from later ones."""
        self._quarantined.add(dropped.prompt.id)
        self._on_quarantine(dropped.prompt)
        listener = self._leave_out(dropped)
        if listener is not None:
            listener.on_dropped(dropped.group_id)

    def _leave_out(self, dropped: Dropped) -> GroupListener | None:
        batch_id = self._batch_of.pop(dropped.group_id)
        batch = self._batches[batch_id]
        batch.total -= dropped.num_rollouts
        batch.done -= dropped.num_done
        self._finish_if_done(batch_id, batch)
        return batch.listener

    def _dispatch(self) -> None:
        full: list[str] = []
        while self.ledger.num_pending and self._loads:
            load, _, name = heapq.heappop(self._loads)
            mailbox = self._mailboxes.get(name)
            if mailbox is None or load != self.ledger.load(name):
                continue  # outdated; the heap holds a newer entry of this engine
            if load >= self._max_in_flight:
                full.append(name)
                break  # the least loaded engine is full
            room = self._max_in_flight * len(self._mailboxes) - self.ledger.num_assigned
            request = self.ledger.assign(name, together=self.ledger.num_pending > room)
            if request is None:
                full.append(name)
                continue
            mailbox.outbox.append(request)
            if not load:
                self._lessor.on_work(name)
            mailbox.mail.set()
            mailbox.work.set()
            self._note_load(name)
        for name in full:
            self._note_load(name)

    def _note_load(self, name: str) -> None:
        self._ties += 1  # equal loads take turns
        heapq.heappush(self._loads, (self.ledger.load(name), self._ties, name))
        if len(self._loads) > 8 * len(self._mailboxes) + 64:  # most are outdated; one per engine suffices
            self._loads = [(self.ledger.load(name), tie, name) for tie, name in enumerate(self._mailboxes)]
            heapq.heapify(self._loads)

    async def _guard(self, work: Coroutine[None, None, None]) -> None:
        """Report an unexpected error to everything that waits for a batch, instead of losing it with its task."""
        try:
            await work
        except Exception as failure:  # noqa: BLE001  raised by every waiter
            self._fail(failure)

    async def _submit(self, mailbox: _Mailbox) -> None:
        while True:
            await mailbox.mail.wait()
            await self._lessor.awake(mailbox.engine.name)
            mailbox.mail.clear()
            requests, mailbox.outbox = mailbox.outbox, []
            aborts = mailbox.aborts[:]
            try:
                if requests:
                    await mailbox.engine.submit(requests)
                if aborts:  # after the requests that they abort
                    await mailbox.engine.abort(aborts)
            except EngineLostError as lost:
                self.members.lose(mailbox.engine.name, lost.why)
                return
            del mailbox.aborts[: len(aborts)]
            if aborts:
                self._note_drained(mailbox)

    async def _collect(self, mailbox: _Mailbox) -> None:
        name = mailbox.engine.name
        while True:
            await mailbox.work.wait()
            try:
                rollouts = await mailbox.engine.collect()
            except EngineLostError as lost:
                self.members.lose(name, lost.why)
                return
            for rollout in rollouts:
                self._settle(rollout, name)
            if not self.ledger.load(name):
                mailbox.work.clear()
            self._note_load(name)
            self._dispatch()
            self._note_drained(mailbox)

    def _note_drained(self, mailbox: _Mailbox) -> None:
        """Report an idle engine. An engine with pending aborts is not idle."""
        if not self.ledger.load(mailbox.engine.name) and not mailbox.aborts:
            self._lessor.on_drained(mailbox.engine.name)

    def _settle(self, rollout: Rollout, engine: str) -> None:
        if not self.ledger.accept(rollout, engine):
            return
        batch_id = self._batch_of[rollout.group_id]
        batch = self._batches[batch_id]
        batch.done += 1
        batch.num_tokens += len(rollout.token_ids)
        group = self.ledger.close(rollout.group_id)
        if group is not None:
            del self._batch_of[group.group_id]
            batch.groups[group.group_id] = group
            self._learn_length(group)
            if batch.listener is not None:
                batch.listener.on_group(group)
        self._on_progress(batch)
        self._finish_if_done(batch_id, batch)

    def _finish_if_done(self, batch_id: int, batch: Batch) -> None:
        if batch.done == batch.total and batch_id in self._batches:
            del self._batches[batch_id]
            batch.finished.set()

    def _learn_length(self, group: Group) -> None:
        length = sum(len(r.token_ids) for r in group.rollouts) / len(group.rollouts)
        self._mean_length.pop(group.prompt.id, None)
        self._mean_length[group.prompt.id] = length
        if len(self._mean_length) > _MOST_LENGTHS:
            del self._mean_length[next(iter(self._mean_length))]  # evict the least recently seen prompt
        self._typical_length += 0.05 * (length - self._typical_length)  # the estimate for new prompts

    def _fail(self, failure: BaseException) -> None:
        for batch in self._batches.values():
            batch.failure = failure
            batch.finished.set()
            if batch.listener is not None:
                batch.listener.on_failure(failure)
        self._batches.clear()
