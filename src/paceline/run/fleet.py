"""All engines as one: prompts in, groups out, nothing lost when an engine dies.

    open(prompts) ──▶ ledger ──assign──▶ outbox ──submit──▶ engine
         ▲              │  ▲                                  │
       batch ◀──group───┘  └──────complete──── collect ◀──────┘      (two tasks per engine: _submit and _collect)

A rollout goes to the engine with the fewest rollouts, and only while that engine has a free slot; the rest wait here, longest
expected first, so that an engine that finishes early takes work that nobody else has started. Dispatch costs O(log engines).
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from paceline.run.ledger import Ledger
from paceline.types import Engine, EngineLostError, Group, PacelineError, Prompt, Rollout, RolloutRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the rollouts of a batch are drawn."""

    group_size: int
    temperature: float
    max_tokens: int


@dataclass(slots=True, kw_only=True)
class Batch:
    """Groups that were opened together, in the order of their prompts."""

    total: int
    group_ids: tuple[int, ...]
    groups: dict[int, Group] = field(default_factory=dict)
    done: int = 0
    num_tokens: int = 0
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    failure: BaseException | None = None

    async def wait(self) -> list[Group]:
        await self.finished.wait()
        if self.failure is not None:
            raise self.failure
        return [self.groups[group_id] for group_id in self.group_ids]


class Lending(Protocol):
    """Who lends the places of idle engines, and has to give them back."""

    def on_work(self, engine: str) -> None:
        """It was idle and has rollouts now."""
        ...

    def on_drained(self, engine: str) -> None:
        """It has finished all of them, and none wait."""
        ...

    def on_lost(self, engine: str) -> None: ...

    async def awake(self, engine: str) -> None:
        """Wait until it can take rollouts."""
        ...


@dataclass(slots=True)
class _Member:
    engine: Engine
    outbox: list[RolloutRequest] = field(default_factory=list)
    mail: asyncio.Event = field(default_factory=asyncio.Event)
    work: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)


class Fleet:
    """Use as an async context manager: the tasks that talk to the engines live inside it."""

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        slots: int,
        on_lost: Callable[[str, str, int], None],
        on_progress: Callable[[Batch], None] = lambda batch: None,
        lending: Lending | None = None,
    ) -> None:
        self.ledger = Ledger()
        self._members = {engine.name: _Member(engine) for engine in engines}
        assert len(self._members) == len(engines), "engines have names of their own"
        self._slots = slots
        self._on_lost = on_lost
        self._on_progress = on_progress
        self._lending = lending
        self._loads: list[tuple[int, int, str]] = []
        self._ties = 0
        self._closing: set[asyncio.Task[None]] = set()
        self._batches: dict[int, Batch] = {}
        self._batch_of: dict[int, int] = {}
        self._next_batch = 0
        self._next_group = 0
        self._mean_length: dict[str, float] = {}
        self._typical_length = 0.0

    @property
    def engines(self) -> list[Engine]:
        return [member.engine for member in self._members.values()]

    async def __aenter__(self) -> Fleet:
        for member in self._members.values():
            member.tasks = [asyncio.create_task(self._guard(work(member))) for work in (self._submit, self._collect)]
            self._note_load(member.engine.name)
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [task for member in self._members.values() for task in member.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._closing, return_exceptions=True)

    def open(self, prompts: Sequence[Prompt], sampling: Sampling) -> Batch:
        """Start sampling a batch; older batches go first."""
        batch_id, self._next_batch = self._next_batch, self._next_batch + 1
        first, self._next_group = self._next_group, self._next_group + len(prompts)
        batch = Batch(total=len(prompts) * sampling.group_size, group_ids=tuple(range(first, self._next_group)))
        self._batches[batch_id] = batch
        for group_id, prompt in zip(batch.group_ids, prompts, strict=True):
            self._batch_of[group_id] = batch_id
            requests = [
                RolloutRequest(
                    group_id=group_id,
                    index=index,
                    prompt_ids=prompt.token_ids,
                    max_tokens=sampling.max_tokens,
                    temperature=sampling.temperature,
                )
                for index in range(sampling.group_size)
            ]
            expected = self._mean_length.get(prompt.id, self._typical_length)
            self.ledger.open(batch=batch_id, prompt=prompt, requests=requests, expected_length=expected)
        if not self._members:
            self._fail(PacelineError("every engine is lost"))
        self._dispatch()
        return batch

    def lose(self, engine: str, why: str) -> None:
        """Stop using an engine and give its rollouts to the others."""
        member = self._members.pop(engine, None)
        if member is None:
            return
        for task in member.tasks:
            if task is not asyncio.current_task():
                task.cancel()
        if self._lending is not None:
            self._lending.on_lost(engine)
        # A frozen engine still holds memory and cores.
        self._closing.add(closing := asyncio.create_task(member.engine.close()))
        closing.add_done_callback(self._closing.discard)
        try:
            self._on_lost(engine, why, self.ledger.lose(engine))
            if not self._members:
                raise PacelineError(f"every engine is lost; the last was {engine}: {why}")
        except PacelineError as failure:
            self._fail(failure)
            return
        self._dispatch()

    def _dispatch(self) -> None:
        while self.ledger.num_pending and self._loads:
            load, _, name = heapq.heappop(self._loads)
            member = self._members.get(name)
            if member is None or load != self.ledger.load(name):
                continue  # an entry of the past; the present one is in the heap as well
            if load >= self._slots:
                self._note_load(name)
                return  # the least loaded engine is full
            member.outbox.append(self.ledger.assign(name))
            if not load and self._lending is not None:
                self._lending.on_work(name)
            member.mail.set()
            member.work.set()
            self._note_load(name)

    def _note_load(self, name: str) -> None:
        self._ties += 1  # equal loads take turns
        heapq.heappush(self._loads, (self.ledger.load(name), self._ties, name))

    async def _guard(self, work: Coroutine[None, None, None]) -> None:
        """An error that nobody foresaw must reach those who wait for a batch, not die with its task."""
        try:
            await work
        except Exception as failure:  # noqa: BLE001  handed on to every waiter
            self._fail(failure)

    async def _submit(self, member: _Member) -> None:
        while True:
            await member.mail.wait()
            if self._lending is not None:
                await self._lending.awake(member.engine.name)
            member.mail.clear()
            requests, member.outbox = member.outbox, []
            try:
                await member.engine.submit(requests)
            except EngineLostError as lost:
                return self.lose(member.engine.name, lost.why)

    async def _collect(self, member: _Member) -> None:
        name = member.engine.name
        while True:
            await member.work.wait()
            try:
                rollouts = await member.engine.collect()
            except EngineLostError as lost:
                return self.lose(name, lost.why)
            for rollout in rollouts:
                self._settle(rollout, name)
            if not self.ledger.load(name):
                member.work.clear()
            self._note_load(name)
            self._dispatch()
            if self._lending is not None and not self.ledger.load(name):
                self._lending.on_drained(name)

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
        self._on_progress(batch)
        if batch.done == batch.total:
            del self._batches[batch_id]
            batch.finished.set()

    def _learn_length(self, group: Group) -> None:
        length = sum(len(r.token_ids) for r in group.rollouts) / len(group.rollouts)
        self._mean_length[group.prompt.id] = length
        self._typical_length += 0.05 * (length - self._typical_length)  # what a prompt never seen before is taken for

    def _fail(self, failure: BaseException) -> None:
        """Nothing open can be finished any more: tell everybody who waits."""
        for batch in self._batches.values():
            batch.failure = failure
            batch.finished.set()
        self._batches.clear()
