"""A simulated engine with continuous batching: a queue, a KV cache that fills, and the real selector.

The batch is constant between two events: a request arrives or ends, the KV cache is full, or contexts have grown by an
eighth. All steps in between form one span with one timer. The selector chooses once per span, or per step while it
probes, so its step counters run slower than in a real engine. Every request emits the mean accepted length per step.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, inf

from paceline.plan.engine_model import StepModel
from paceline.plan.simulate import finished_rollout
from paceline.selector.cost import Step
from paceline.selector.select import Selector
from paceline.types import DraftBin, Rollout, RolloutId, RolloutRequest

_GROWTH = 1 / 8
"""Relative growth of the mean context that ends a span."""


@dataclass(slots=True)
class _Job:
    request: RolloutRequest
    length: int
    done: float = 0.0
    """Tokens generated before preemption."""
    started_s: float | None = None
    version: int = 0
    joined_at: float = 0.0
    """Token clock of the engine on admission."""
    drafted_at: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Verifications, drafted and accepted tokens of the engine on admission."""

    @property
    def context(self) -> float:
        return len(self.request.prompt_ids) + self.done


@dataclass(slots=True)
class _DecodeSpan:
    began_s: float
    seconds: float
    num_tokens: float
    k: int
    handle: asyncio.TimerHandle


@dataclass(slots=True, kw_only=True)
class BatchingEngine:
    """Simulated `paceline.types.Engine`."""

    name: str
    model: StepModel
    selector: Selector
    length_of: Callable[[RolloutRequest], int]
    max_num_seqs: int
    policy_version: int = 0
    num_preempted: int = 0
    busy_s: float = 0.0
    _waiting: deque[_Job] = field(default_factory=deque)
    _running: list[tuple[float, int, _Job]] = field(default_factory=list)
    """Heap ordered by the token clock of each end."""
    _clock: float = 0.0
    """Tokens emitted so far by a request that has run since the start."""
    _context_base: float = 0.0
    """Sum over running requests of context minus token clock on admission."""
    _counts: tuple[float, float, float] = (0.0, 0.0, 0.0)
    _order: int = 0
    _prefill: float = 0.0
    _span: _DecodeSpan | None = None
    _paused: bool = False
    _last_k: int = 0
    _carry: list[float] = field(default_factory=list)
    _finished: list[Rollout] = field(default_factory=list)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    async def submit(self, requests: Sequence[RolloutRequest]) -> None:
        self._waiting.extend(_Job(request, self.length_of(request)) for request in requests)
        self._restart()

    async def collect(self) -> Sequence[Rollout]:
        if not self._finished:
            self._news.clear()
            await self._news.wait()
        finished, self._finished = self._finished, []
        return finished

    async def abort(self, ids: Sequence[RolloutId]) -> None:
        self._stop()
        self._waiting = deque(job for job in self._waiting if job.request.id not in ids)
        for _, _, job in self._running:
            if job.request.id in ids:
                self._context_base -= job.context - job.joined_at
        self._running = [entry for entry in self._running if entry[2].request.id not in ids]
        heapq.heapify(self._running)
        self._restart()

    async def pause(self) -> None:
        self._stop()
        self._paused = True

    async def resume(self) -> None:
        self._paused = False
        self._restart()

    async def sleep(self) -> None:
        return

    async def wake(self) -> None:
        return

    async def metrics(self) -> Mapping[str, float]:
        return {"engine/running_requests": len(self._running), "engine/waiting_requests": len(self._waiting)}

    async def take_timeline(self) -> Sequence[DraftBin]:
        return ()

    async def close(self) -> None:
        self._stop()

    @property
    def _context_tokens(self) -> float:
        return self._context_base + len(self._running) * self._clock

    def _stop(self) -> None:
        span, self._span = self._span, None
        if span is None:
            return
        span.handle.cancel()
        passed_s = asyncio.get_running_loop().time() - span.began_s
        share = min(passed_s / span.seconds, 1.0) if span.seconds else 1.0
        tokens, draft = share * span.num_tokens, self.model.options[span.k]
        self.busy_s += passed_s
        self._clock += tokens
        steps = tokens / draft.alpha
        if span.k:
            verifications, drafted, accepted = self._counts
            self._counts = (verifications + steps, drafted + steps * (draft.verified - 1), accepted + tokens - steps)

    def _restart(self) -> None:
        self._stop()
        if self._paused:
            return
        self._finish()
        self._preempt()
        self._admit()
        if self._running:
            self._begin()

    def _begin(self) -> None:
        batch, context = len(self._running), self._context_tokens
        k = self.selector.choose(batch, int(context))
        draft = self.model.options[k]
        probing = k != self._last_k and self.selector.figures().get("current", k) != k
        mean = context / batch
        tokens = min(self._running[0][0] - self._clock, max(_GROWTH * mean, 32.0))
        if self.model.capacity_tokens < inf:
            tokens = min(tokens, max((self.model.capacity_tokens - context) / batch, 0.0) + 1.0)
        steps = 1 if probing else max(ceil(tokens / draft.alpha - 1e-9), 1)
        self._last_k = self._last_k if probing else k
        step_s = self.model.step_s(batch, k, mean + 0.5 * steps * draft.alpha)
        self._report(batch, int(context), k, step_s)
        prefill_s = self.model.prefill_s(self._prefill) if self._prefill else 0.0
        self._prefill = 0.0
        loop = asyncio.get_running_loop()
        seconds = steps * step_s + prefill_s
        handle = loop.call_later(seconds, self._restart)
        self._span = _DecodeSpan(loop.time(), seconds, steps * draft.alpha, k, handle)

    def _report(self, batch: int, context: int, k: int, seconds: float) -> None:
        """Report a step in whole tokens; carry the remainder to the next step."""
        options = self.model.options
        self._carry += [0.0] * (k - len(self._carry))
        accepted = []
        for j in range(k):
            expected = batch * (options[j + 1].alpha - options[j].alpha) + self._carry[j]
            accepted.append(min(int(expected), batch))
            self._carry[j] = expected - accepted[-1]
        self.selector.observe(
            Step(
                num_requests=batch,
                num_prefill_tokens=0,
                context_tokens=context,
                verified=k,
                drafted=k,
                seconds=seconds,
                proposed_at=(batch,) * k,
                accepted_at=tuple(accepted),
                num_emitted=batch + sum(accepted),
            )
        )

    def _admit(self) -> None:
        room = self.model.capacity_tokens - self._context_tokens
        now_s = asyncio.get_running_loop().time()
        while self._waiting and len(self._running) < self.max_num_seqs:
            job = self._waiting[0]
            if self._running and job.context + len(self._running) + 1 > room:
                return
            self._waiting.popleft()
            room -= job.context
            if job.started_s is None:
                job.started_s, job.version = now_s, self.policy_version
            job.joined_at, job.drafted_at = self._clock, self._counts
            self._context_base += job.context - self._clock
            self._prefill += job.context
            self._order += 1
            heapq.heappush(self._running, (self._clock + job.length - job.done, self._order, job))

    def _preempt(self) -> None:
        """Preempt the newest requests until the KV cache fits; their context is recomputed later."""
        while len(self._running) > 1 and self._context_tokens > self.model.capacity_tokens:
            entry = max(self._running, key=lambda entry: entry[1])
            self._running.remove(entry)
            heapq.heapify(self._running)
            job = entry[2]
            self._context_base -= job.context - job.joined_at
            job.done += self._clock - job.joined_at
            self._waiting.appendleft(job)
            self.num_preempted += 1

    def _finish(self) -> None:
        while self._running and self._running[0][0] <= self._clock + 1e-6:
            job = heapq.heappop(self._running)[2]
            self._context_base -= job.context - job.joined_at
            assert job.started_s is not None
            verifications, drafted, accepted = (
                now - then for now, then in zip(self._counts, job.drafted_at, strict=True)
            )
            self._finished.append(
                finished_rollout(
                    job.request,
                    job.length,
                    engine=self.name,
                    started_s=job.started_s,
                    version=job.version,
                    version_end=self.policy_version,
                    drafts=(round(verifications), round(drafted), round(accepted)),
                    num_logp=1,
                )
            )
            self._news.set()
