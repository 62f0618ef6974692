"""Step vLLM's engine by hand in a child process, with access to its scheduler, to time its steps.

    SteppedEngine.run(requests, selector) ──pipe──▶ child: vllm.LLM without EngineCore process ── worker

Several engines take turns, batch by batch or (`lockstep`) slice by slice. Between two batches the scheduler's selector
is replaced, so arms differ in nothing else. Offline only: no deadline, no streaming.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from paceline.config import EngineConfig, SelectorConfig, SpeculationConfig
from paceline.rollout.arguments import end_tokens, engine_args, sampling_params, set_environment
from paceline.rollout.internals import coupling
from paceline.rollout.internals.scheduler import limit_requests
from paceline.selector.cost import Step
from paceline.types import PacelineError, RolloutRequest

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput

    from paceline.rollout.scheduler import AdaptiveScheduler
    from paceline.selector.select import Selector


_SLICE = 0.1
"""Share of a batch's tokens per turn of an engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SteppedBatch:
    """Result of one batch."""

    seconds: float
    finished_s: list[float]
    """Time at which each request finished, in seconds of this engine's steps."""
    token_ids: list[list[int]]
    step_s: list[tuple[int, float]]
    """Running requests and seconds of every engine step, measured outside the engine."""
    steps: list[Step]
    """The scheduler's records of the steps, with the seconds of `step_s`; empty without speculation."""
    figures: dict[str, float]
    """The selector's figures at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Progress of a batch."""

    share: float
    """Share of the maximum tokens."""
    num_tokens: int
    num_running: int
    draft_length: int
    """Draft length verified in the last step."""
    seconds: float
    """Time in this engine's steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A batch to generate. `selector` is built on the first use of `name` and keeps its state for later batches."""

    requests: Sequence[RolloutRequest]
    selector: SelectorConfig | None = None
    """None without speculation."""
    name: str = ""
    to_the_end: bool = False
    """Run every request to its max_tokens, so all arms do the same work."""
    most_active: int | None = None
    """Maximum running requests; None for the engine's own limit."""
    forget_prefixes: bool = False
    """Start without cached prefixes, as after a weight sync."""


class SteppedEngine:
    """One vLLM in a child process. The constructor returns at once; the first call waits for the engine."""

    def __init__(
        self,
        model_path: Path,
        config: EngineConfig,
        *,
        seed: int,
        cpus: Sequence[int] | None = None,
        speculation: SpeculationConfig | None = None,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, model_path, config, seed, cpus, speculation), daemon=False
        )
        self._process.start()
        theirs.close()

    def wait(self) -> int:
        """Wait until the engine is ready; return the size of its KV cache in tokens."""
        return self._answer()

    def run(self, order: Order) -> SteppedBatch:
        (batch,) = lockstep([(self, order)])
        return batch

    def begin(self, order: Order) -> None:
        self._pipe.send(order)
        self._answer()

    def turn(self) -> Turn | SteppedBatch:
        """Make one engine step; return the progress, or the finished batch."""
        self._pipe.send(True)
        return self._answer()

    def close(self) -> None:
        if self._process.is_alive():
            self._pipe.send(None)
            self._process.join(20)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _answer(self) -> Any:
        try:
            answer = self._pipe.recv()
        except EOFError:
            raise PacelineError("the engine's process ended; its last output is above") from None
        if isinstance(answer, BaseException):
            raise answer
        return answer


@contextmanager
def stepped_engine(
    model_path: Path, speculation: SpeculationConfig | None, *, seed: int, config: EngineConfig
) -> Iterator[SteppedEngine]:
    """Start an engine on all cores and wait until it is ready."""
    engine = SteppedEngine(model_path, config, seed=seed, cpus=sorted(os.sched_getaffinity(0)), speculation=speculation)
    try:
        engine.wait()
        yield engine
    finally:
        engine.close()


def lockstep(orders: Sequence[tuple[SteppedEngine, Order]], part: float = _SLICE) -> list[SteppedBatch]:
    """Run batches on several engines in turns of `part` of a batch, always the engine with the least progress.

    A disturbance of the machine thus hits the same part of every batch. Slices have many steps, because the first find
    cold caches; if a step reads far more than the caches hold, a smaller `part` is better."""
    for engine, order in orders:
        engine.begin(order)
    done: dict[int, SteppedBatch] = {}
    progress = dict.fromkeys(range(len(orders)), 0.0)
    while progress:
        number = min(progress, key=progress.__getitem__)
        until = progress[number] + part
        while number in progress and progress[number] < until:
            answer = orders[number][0].turn()
            if isinstance(answer, SteppedBatch):
                done[number] = answer
                del progress[number]
            else:
                progress[number] = answer.share
    return [done[number] for number in range(len(orders))]


def _serve(
    pipe: Connection,
    model_path: Path,
    config: EngineConfig,
    seed: int,
    cpus: Sequence[int] | None,
    speculation: SpeculationConfig | None,
) -> None:
    set_environment(config, cpus, core_in_process=True)
    from vllm import LLM, EngineArgs

    settings = engine_args(model_path, config, seed, speculation)
    settings.worker_extension_cls = ""
    settings.weight_transfer_config = None
    coupling.install()
    llm = LLM(**{field.name: getattr(settings, field.name) for field in fields(EngineArgs)})
    cache = llm.llm_engine.vllm_config.cache_config
    assert cache.num_gpu_blocks is not None
    pipe.send(cache.num_gpu_blocks * cache.block_size)
    selectors: dict[str, Selector] = {}
    stop_token_ids = end_tokens(model_path)
    while (order := pipe.recv()) is not None:
        try:
            pipe.send(_run(llm, order, selectors, stop_token_ids, pipe))
        except Exception as error:  # noqa: BLE001  the caller handles it
            pipe.send(PacelineError(f"engine: {error!r}"))
    llm.llm_engine.engine_core.shutdown()


def _run(
    llm: LLM, order: Order, selectors: dict[str, Selector], stop_token_ids: Sequence[int], pipe: Connection
) -> SteppedBatch:
    from vllm.inputs.engine import tokens_input

    from paceline.selector.select import build_selector

    scheduler: AdaptiveScheduler = llm.llm_engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]
    most_active = order.most_active or scheduler.scheduler_config.max_num_seqs
    limit_requests(scheduler, most_active)
    if order.forget_prefixes:
        assert llm.reset_prefix_cache(), "no request is in flight, so no prefix is in use"
    recording = None
    if order.selector is not None:
        if order.name not in selectors:
            longest, most = scheduler.num_spec_tokens, scheduler.max_num_running_reqs
            selectors[order.name] = build_selector(order.selector, max_draft_length=longest, max_num_requests=most)
        scheduler.selector = recording = _Recording(selectors[order.name])
    engine = llm.llm_engine
    for number, request in enumerate(order.requests):
        seed = request.seed if coupling.has_keyed_noise() else None
        params = sampling_params(request, [] if order.to_the_end else stop_token_ids, seed)
        params.ignore_eos = order.to_the_end
        engine.add_request(str(number), tokens_input(request.prompt_ids.tolist()), params)
    finished_s = [0.0] * len(order.requests)
    token_ids: list[list[int]] = [[] for _ in order.requests]
    step_s: list[tuple[int, float]] = []
    passed_s = 0.0
    most_tokens, num_tokens = sum(request.max_tokens for request in order.requests), 0
    while in_flight := engine.get_num_unfinished_requests():
        there = num_tokens + sum(request.num_output_tokens for request in scheduler.running)
        pipe.send(
            Turn(
                share=there / most_tokens,
                num_tokens=there,
                num_running=in_flight,
                draft_length=recording.steps[-1].verified if recording is not None and recording.steps else 0,
                seconds=passed_s,
            )
        )
        pipe.recv()
        before_s = time.perf_counter()
        outputs = engine.step()
        seconds = time.perf_counter() - before_s
        step_s.append((min(in_flight, most_active), seconds))
        passed_s += seconds
        if recording is not None:
            recording.take(seconds)
        for output in cast("list[RequestOutput]", outputs):
            number = int(output.request_id)
            finished_s[number] = passed_s
            token_ids[number] = list(output.outputs[0].token_ids)
            num_tokens += len(token_ids[number])
    return SteppedBatch(
        seconds=max(finished_s),
        step_s=step_s,
        finished_s=finished_s,
        token_ids=token_ids,
        steps=recording.steps if recording is not None else [],
        figures=dict(recording.inner.figures()) if recording is not None else {},
    )


class _Recording:
    """Selector that records its steps. Step times are measured outside the engine, as for engines without a
    selector."""

    def __init__(self, inner: Selector) -> None:
        self.inner = inner
        self.steps: list[Step] = []
        self._last: Step | None = None

    def choose(self, num_requests: int, context_tokens: int) -> int:
        return self.inner.choose(num_requests, context_tokens)

    def observe(self, step: Step) -> None:
        self._last = step
        self.inner.observe(step)

    def take(self, seconds: float) -> None:
        """Record the last observed step, if any."""
        if self._last is not None:
            self.steps.append(replace(self._last, seconds=seconds))
            self._last = None

    def expected_rate(self) -> float | None:
        return self.inner.expected_rate()

    def figures(self) -> dict[str, float]:
        return dict(self.inner.figures())
