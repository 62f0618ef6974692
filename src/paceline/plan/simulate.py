"""Virtual clock, simulated learner and contentless rollouts for the real loop.

When no task can run, the clock jumps to the next timer, so an hour of a thousand engines costs only its bookkeeping.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from paceline.config import CorrectionConfig
from paceline.types import Group, PendingGradients, Prompt, Rollout, RolloutRequest, Sample, Scores, Tokens

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


_ZEROS: dict[type[Any], Any] = {np.int32: np.zeros(1024, np.int32), np.float32: np.zeros(1024, np.float32)}


def _zeros(length: int, dtype: type[Any]) -> Any:
    """Return a view of shared zeros: only lengths of simulated rollouts are read."""
    if length > len(_ZEROS[dtype]):
        _ZEROS[dtype] = np.zeros(2 * length, dtype)
    return _ZEROS[dtype][:length]


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
    `num_logp` limits the log-probabilities: comparing each with the learner's would dominate the cost of a simulation.
    Only the last token counts as sampled by `version_end`."""
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
