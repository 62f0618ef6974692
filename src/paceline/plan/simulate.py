"""Simulated engines, learner and weight wire on a virtual clock, for the real loop.

Loop, fleet and ledger are real; engine, learner and wire only take time. When nothing can run, the clock jumps to the
next timer, so an hour of a thousand engines costs only its bookkeeping.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from paceline.config import CorrectionConfig
from paceline.types import (
    DraftBin,
    EngineLostError,
    Group,
    PendingGradients,
    Prompt,
    Receipt,
    Rollout,
    RolloutId,
    RolloutRequest,
    Sample,
    Scores,
    Tokens,
)

T = TypeVar("T")


class _JumpingSelector(selectors.SelectSelector):
    """Advances the clock to the next timer instead of sleeping."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.num_threads = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self.num_threads and timeout != 0:
            return super().select()
        if timeout is None:
            raise RuntimeError("the simulation waits for something that will never happen")
        self.now_s += max(timeout, 0.0)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Asyncio loop with simulated time()."""

    def __init__(self) -> None:
        self._clock = _JumpingSelector()
        super().__init__(self._clock)
        self._threads = ThreadPoolExecutor()
        self.set_default_executor(self._threads)

    def time(self) -> float:
        return self._clock.now_s

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:
        future = super().run_in_executor(executor, func, *args)
        self._clock.num_threads += 1
        future.add_done_callback(self._thread_ended)
        return future

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        self._threads.shutdown()

    def _thread_ended(self, future: asyncio.Future[Any]) -> None:
        self._clock.num_threads -= 1


def run_virtual(work: Callable[[], Coroutine[Any, Any, T]]) -> tuple[T, float]:
    """Run a coroutine in virtual time; return its result and the simulated seconds."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        result = runner.run(work())
        return result, runner.get_loop().time()


@dataclass(slots=True, kw_only=True)
class SimulatedEngine:
    """Engine with rollouts that take `seconds_per_token` per token; at most `max_num_seqs` run at once."""

    name: str
    length_of: Callable[[RolloutRequest], int]
    max_num_seqs: int
    seconds_per_token: float
    lose_at_s: float | None = None
    """Time at which the engine dies with its requests."""
    policy_version: int = 0
    _running: dict[RolloutId, asyncio.TimerHandle] = field(default_factory=dict)
    _waiting: list[RolloutRequest] = field(default_factory=list)
    _finished: list[Rollout] = field(default_factory=list)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    async def submit(self, requests: Sequence[RolloutRequest]) -> None:
        self._check_alive()
        self._waiting += requests
        self._fill()

    async def collect(self) -> Sequence[Rollout]:
        if not self._finished:
            self._news.clear()
            if self.lose_at_s is not None:
                asyncio.get_running_loop().call_at(self.lose_at_s, self._news.set)
            await self._news.wait()
            self._check_alive()
        finished, self._finished = self._finished, []
        return finished

    async def abort(self, ids: Sequence[RolloutId]) -> None:
        self._check_alive()
        self._waiting = [request for request in self._waiting if request.id not in ids]
        for one in ids:
            if (ending := self._running.pop(one, None)) is not None:
                ending.cancel()
        self._fill()

    async def pause(self) -> None:
        self._check_alive()

    async def resume(self) -> None:
        self._check_alive()

    async def sleep(self) -> None:
        self._check_alive()

    async def wake(self) -> None:
        self._check_alive()

    async def metrics(self) -> Mapping[str, float]:
        return {"engine/running_requests": len(self._running), "engine/waiting_requests": len(self._waiting)}

    async def take_timeline(self) -> Sequence[DraftBin]:
        return ()

    async def close(self) -> None:
        return

    def _check_alive(self) -> None:
        if self.lose_at_s is not None and asyncio.get_running_loop().time() >= self.lose_at_s:
            raise EngineLostError(self.name, "killed by the simulation")

    def _fill(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting and len(self._running) < self.max_num_seqs:
            request = self._waiting.pop()
            length = self.length_of(request)
            self._running[request.id] = loop.call_later(
                length * self.seconds_per_token, self._finish, request, length, loop.time(), self.policy_version
            )

    def _finish(self, request: RolloutRequest, length: int, started_s: float, version: int) -> None:
        del self._running[request.id]
        rollout = finished_rollout(
            request, length, engine=self.name, started_s=started_s, version=version, version_end=self.policy_version
        )
        self._finished.append(rollout)
        self._news.set()
        self._fill()


_ZERO = {np.int32: np.zeros(1, np.int32), np.float32: np.zeros(1, np.float32)}


def _zeros(length: int, dtype: type[Any]) -> Any:
    """Return one broadcast zero: only lengths of simulated rollouts are read."""
    return np.broadcast_to(_ZERO[dtype], length)


def finished_rollout(
    request: RolloutRequest,
    length: int,
    *,
    engine: str,
    started_s: float,
    version: int,
    version_end: int,
    drafts: tuple[int, int, int] = (0, 0, 0),
    num_logp: int | None = None,
) -> Rollout:
    """Return a rollout without content that ends now. `drafts` are verifications, drafted and accepted tokens.

    `num_logp` limits the log-probabilities: the loop compares each with the learner's, which would dominate the cost of
    a simulation. Only the last token counts as sampled by `version_end`."""
    spans = ((version, length - 1), (version_end, 1)) if length > 1 and version_end > version else ((version, length),)
    return Rollout(
        group_id=request.group_id,
        index=request.index,
        prompt_ids=request.prompt_ids,
        token_ids=_zeros(length, np.int32),
        logp=_zeros(length if num_logp is None else num_logp, np.float32),
        finish_reason="length" if length >= request.max_tokens else "stop",
        version_spans=spans,
        engine=engine,
        started_s=started_s,
        finished_s=asyncio.get_running_loop().time(),
        num_verifications=drafts[0],
        num_drafted=drafts[1],
        num_accepted=drafts[2],
    )


@dataclass(slots=True, kw_only=True)
class SimulatedLearner:
    """Takes time proportional to the number of tokens."""

    seconds_per_token: float = 0.0

    async def score(
        self, samples: Sequence[Sample], *, correction: CorrectionConfig | None = None, hand_over: bool = False
    ) -> Scores:
        await asyncio.sleep(self.seconds_per_token / 3 * sum(len(sample.token_ids) for sample in samples))
        return Scores(logp=[sample.logp for sample in samples])

    async def discard(self) -> None:
        return

    async def apply(self, samples: Sequence[Sample], *, pending: PendingGradients | None = None) -> Mapping[str, float]:
        await asyncio.sleep(self.seconds_per_token * sum(len(sample.token_ids) for sample in samples))
        return {"policy/loss": 0.0}

    async def calibrate(self, samples: Sequence[Sample], version: int) -> Mapping[str, float]:
        return {"precision/qk_norm": 1.0, "precision/underflow_share": 0.0}

    async def counters(self) -> Mapping[str, float]:
        return {}

    async def save(self, path: str) -> None:
        return

    async def save_state(self, path: str) -> None:
        return

    async def load_state(self, path: str) -> None:
        return

    async def close(self) -> None:
        return


@dataclass(slots=True, kw_only=True)
class SimulatedSender:
    """Delivers a push to every engine after `seconds`."""

    engines: Sequence[SimulatedEngine]
    seconds: float = 0.0

    async def send(self, version: int) -> Sequence[Receipt]:
        await asyncio.sleep(self.seconds)
        for engine in self.engines:
            engine.policy_version = version
        return [
            Receipt(engine=engine.name, version=version, num_tensors=1, num_bytes=1, seconds=self.seconds)
            for engine in self.engines
        ]


def simulated_prompts(num_tokens: int = 16) -> Iterator[Prompt]:
    """Infinite iterator of empty prompts."""
    token_ids: Tokens = np.zeros(num_tokens, np.int32)
    index = 0
    while True:
        yield Prompt(id=f"simulated/{index}", text="", token_ids=token_ids, row={})
        index += 1


async def score_by_parity(groups: Sequence[Group]) -> list[list[float]]:
    """Return alternating rewards 0 and 1, so every group has a gradient."""
    return [[float(rollout.index % 2) for rollout in group.rollouts] for group in groups]


def long_tailed_lengths(
    seed: int, *, median: float = 70.0, sigma: float = 0.8, maximum: int = 640
) -> Callable[[RolloutRequest], int]:
    """Return log-normal lengths as in the arena; a rollout has the same length on every engine."""
    table = np.clip(np.random.default_rng(seed).lognormal(np.log(median), sigma, 65536), 1, maximum).astype(int)

    def length_of(request: RolloutRequest) -> int:
        return int(table[(request.group_id.number * 31 + request.index * 7919) % len(table)])

    return length_of
