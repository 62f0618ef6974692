"""One vLLM engine: requests in, finished rollouts out, a deadline on everything.

    submit ──▶ AsyncLLM ──zmq──▶ EngineCore ── worker(s)       vLLM's processes, children of this one
                  │
    collect ◀── finished rollouts, each exactly once

A lost engine stays lost: every method raises the same EngineLostError. An engine is lost if vLLM reports it dead, if a
call misses its deadline, if it owes an answer and its processes are frozen (pulse.py), if requests are in flight
without a token for `rollout.engine.deadline_s`, or if vLLM drops a request without `abort`, which would leave its group
incomplete.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import psutil

from paceline.config import EngineConfig, SpeculationConfig
from paceline.rollout.arguments import end_tokens, engine_args, leave_sampler_stock, sampling_params, set_environment
from paceline.rollout.counters import EngineCounters
from paceline.rollout.internals import requests as vllm_requests
from paceline.rollout.internals import scheduler_calls
from paceline.rollout.internals.platform import on_cpu
from paceline.rollout.internals.version import check_version
from paceline.rollout.pulse import Pulse, vitals_of
from paceline.rollout.speculation import check_drafter
from paceline.types import DraftBin, EngineLostError, PacelineError, Receipt, Rollout, RolloutId, RolloutRequest

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestOutputCollector

    from paceline.weights.message import Push

T = TypeVar("T")

_CLOSE_DEADLINE_S = 10.0
_TRANSFERS = frozenset({"receive_push", "init_weight_transfer_engine"})
"""Calls with the deadline of a push: they move a whole policy or wait for all participants."""
# vLLM reads the environment at start, and engines of one process may need different ones.
_START_LOCK = threading.Lock()


class VllmEngine:
    """Implements `types.Engine`, on the event loop of `start`."""

    def __init__(
        self,
        name: str,
        llm: AsyncLLM,
        config: EngineConfig,
        *,
        counters: EngineCounters,
        stop_token_ids: Sequence[int],
        speculates: bool,
    ) -> None:
        self.name, self.config = name, config
        self.policy_version = 0
        self._vllm: AsyncLLM | None = llm
        self._counters = counters
        self._stop_token_ids = list(stop_token_ids)
        self._speculates = speculates
        self._is_seeded = config.deterministic
        """Whether vLLM gets the seeds of requests. Where noise is not keyed by position, tokens depend on the batch in
        any case, and V1's generators are slow."""
        self._processes: list[psutil.Process] = []
        self._pulse = Pulse(lambda: vitals_of(self._processes))
        self._num_calls = 0
        """Pending calls. They have their own deadlines and may wait for others: a push waits for the learner."""
        self._ping: asyncio.Task[None] | None = None
        self._in_flight: dict[asyncio.Task[None], RolloutId] = {}
        self._finished: list[Rollout] = []
        self._news = asyncio.Event()
        self._paused = False
        self._lost: EngineLostError | None = None

    @property
    def _llm(self) -> AsyncLLM:
        if self._vllm is None:
            raise self._lose("closed")
        return self._vllm

    @classmethod
    async def start(
        cls,
        name: str,
        model_path: str | Path,
        config: EngineConfig,
        *,
        seed: int,
        cpus: Sequence[int] | None = None,
        speculation: SpeculationConfig | None = None,
        adjust: Callable[[AsyncEngineArgs], None] | None = None,
        stock_sampler: bool = False,
    ) -> VllmEngine:
        """Start vLLM's processes and wait until they can generate.

        `cpus` pins the workers' threads; None leaves them free. `adjust` may change vLLM's arguments before the engine
        is built. `stock_sampler` keeps vLLM's sampler even if it is known to be wrong, to test certify.
        """
        path = Path(model_path)
        stop_token_ids = end_tokens(path)
        if speculation is not None:
            check_drafter(speculation, path, config)
        counters = EngineCounters()
        strangers = {child.pid for child in multiprocessing.active_children()}

        def build() -> AsyncLLM:
            """Block until EngineCore is ready. Runs in a thread, so `start` can keep its deadline."""
            with _START_LOCK:
                set_environment(config, cpus)
                if stock_sampler:
                    leave_sampler_stock()
                import vllm
                from vllm.v1.engine.async_llm import AsyncLLM

                check_version(vllm.__version__)
                args = engine_args(path, config, seed, speculation)
                if adjust is not None:
                    adjust(args)
                return AsyncLLM.from_engine_args(args, stat_loggers=[cast("Any", lambda *_: counters)])

        try:
            llm = await asyncio.wait_for(asyncio.to_thread(build), config.start_deadline_s)
        except (TimeoutError, asyncio.CancelledError) as error:
            _kill(_descendants(strangers))  # or the waiting thread would delay exit
            if isinstance(error, asyncio.CancelledError):
                raise
            raise EngineLostError(name, f"did not start within {config.start_deadline_s:.0f} s") from None
        except RuntimeError as error:
            raise EngineLostError(name, f"did not start: {error}") from error
        speculates = speculation is not None
        engine = cls(name, llm, config, counters=counters, stop_token_ids=stop_token_ids, speculates=speculates)
        try:
            pids = {pid for pair in await engine.rpc("paceline_processes") for pid in pair}
            engine._processes = [psutil.Process(pid) for pid in sorted(pids)]
            await engine._label(0)
            await engine._inspect_samplers(speculation, stock=stock_sampler)
        except BaseException:
            await engine.close()
            raise
        return engine

    async def heartbeat(self) -> None:
        """Raise EngineLostError if the engine is lost. Ping an idle engine; the next call checks the answer."""
        self._check_alive()
        if not self._in_flight and not self._num_calls and self._ping is None:
            self._ping = asyncio.create_task(self._ask_for_life())

    async def submit(self, requests: Sequence[RolloutRequest]) -> None:
        for request in requests:
            if len(request.prompt_ids) >= self.config.max_model_len:
                raise ValueError(
                    f"prompt_ids: got {len(request.prompt_ids)} tokens; must be fewer than max_model_len "
                    f"({self.config.max_model_len}) because the response needs room"
                )
        if not self._in_flight:
            self._counters.touch()
        await self._call("submit", self._add(requests))

    async def collect(self) -> Sequence[Rollout]:
        while not self._finished:
            self._check_alive()
            try:
                # Short waits, because the progress deadline moves with every token.
                await asyncio.wait_for(self._news.wait(), min(1.0, self.config.deadline_s / 4))
            except TimeoutError:
                continue
            self._news.clear()
        finished, self._finished = self._finished, []
        return finished

    async def abort(self, ids: Sequence[RolloutId]) -> None:
        unwanted = set(ids)
        found = {task: one for task, one in self._in_flight.items() if one in unwanted}
        for task in found:
            task.cancel()  # or vLLM's abort would count as an engine failure
        await self._call("abort", vllm_requests.abort(self._llm, list(found.values())))

    async def pause(self) -> None:
        await self._call("pause", self._llm.pause_generation(mode="keep", clear_cache=False))
        self._paused = True

    async def resume(self) -> None:
        await self._call("resume", self._llm.resume_generation())
        self._counters.touch()
        self._paused = False

    async def sleep(self) -> None:
        """Free GPU memory. vLLM's CPU backend cannot, so there this only pauses."""
        if self._in_flight:
            raise PacelineError(
                f"engine {self.name}: cannot sleep with {len(self._in_flight)} requests, which would lose their KV "
                "cache"
            )
        if on_cpu():
            await self.pause()
        else:
            await self._call("sleep", self._llm.sleep(level=1))

    async def wake(self) -> None:
        if on_cpu():
            await self.resume()
        else:
            await self._call("wake", self._llm.wake_up())

    async def set_draft_limit(self, limit: int | None) -> None:
        """Draft at most `limit` tokens from the next step; 0 stops speculation, None removes the limit."""
        if self._speculates:
            await self._call("set_draft_limit", scheduler_calls.call(self._llm, "set_draft_limit", limit))

    async def metrics(self) -> Mapping[str, float]:
        """Return totals since the start by metric key. A late answer does not lose the engine."""
        self._check_alive()
        found = self._counters.read()
        if self._speculates:
            chosen, drafters, monitors = await self._ask(
                scheduler_calls.call(self._llm, "counters"),
                self._llm.collective_rpc("drafter_counters"),
                self._llm.collective_rpc("monitor_figures"),
            )
            found |= chosen | monitors[0]  # all ranks see the same verifications
            for drafter in drafters:  # one per worker
                for key, value in drafter.items():
                    found[f"history/{key}"] = found.get(f"history/{key}", 0.0) + value
        return found

    async def take_timeline(self) -> Sequence[DraftBin]:
        """Return draft lengths over time since the last call; empty without speculation."""
        self._check_alive()
        if not self._speculates:
            return ()
        (rows,) = await self._ask(scheduler_calls.call(self._llm, "take_timeline"))
        return [DraftBin(*row) for row in rows]

    async def rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method of `worker.WorkerExtension` or vLLM's worker on all workers; return answers by rank."""
        deadline_s = self.config.push_deadline_s if method in _TRANSFERS else None
        return await self._call(method, self._llm.collective_rpc(method, args=args), deadline_s)

    async def receive(self, push: Push) -> Receipt:
        """Apply a push of weights; see `paceline.weights` for its guarantees."""
        from paceline.weights.deliver import deliver

        return await deliver(self, push)

    async def on_new_weights(self, version: int) -> None:
        """Label new tokens with `version` and drop cached prefixes of the old policy.

        If requests in flight hold such blocks, vLLM can drop them only by recomputing the requests' KV cache; their
        tokens and versions do not change. Without `recompute_kv_at_sync` these requests keep the old blocks, and new
        requests cannot use them because they have another cache salt.
        """
        reset = await self._call("reset_prefix_cache", self._llm.reset_prefix_cache())
        if not reset and self.config.recompute_kv_at_sync:
            await self._call("reset_prefix_cache", self._llm.reset_prefix_cache(reset_running_requests=True))
        await self._label(version)

    async def close(self) -> None:
        self._lose("closed")
        llm, self._vllm = self._vllm, None
        if llm is None:
            return
        for task in (*self._in_flight, *([] if self._ping is None else [self._ping])):
            task.cancel()
        await asyncio.gather(*self._in_flight, return_exceptions=True)
        with suppress(TimeoutError):  # survivors are killed below
            await asyncio.wait_for(vllm_requests.shut_down(llm, _CLOSE_DEADLINE_S / 2), _CLOSE_DEADLINE_S)
        await asyncio.to_thread(_kill, self._processes)

    async def _inspect_samplers(self, speculation: SpeculationConfig | None, *, stock: bool) -> None:
        workers = await self.rpc("paceline_sampler")
        self._is_seeded |= all(worker["keyed"] for worker in workers)
        if speculation is None:
            return
        for worker in workers:
            if worker["verification"] != speculation.verification:
                raise PacelineError(
                    f"engine {self.name}: got speculation.verification {speculation.verification!r}, but its runner "
                    f"{worker['runner']} verifies by {worker['verification']!r}; must be 'standard' on CPUs with vLLM "
                    "before 0.32"
                )
            if not worker["sound"] and not stock:
                raise PacelineError(
                    f"engine {self.name}: its sampler {worker['sampler']} draws from a wrong distribution under "
                    "speculation (vLLM issue 55005), because vLLM did not load the plugin paceline_sampler that mends "
                    "it; add it to VLLM_PLUGINS or unset that"
                )

    async def _label(self, version: int) -> None:
        await self._call("update_weight_version", self._llm.update_weight_version(str(version)))
        self.policy_version = version

    async def _add(self, requests: Sequence[RolloutRequest]) -> None:
        for request in requests:
            started_s = time.monotonic()
            seed = request.seed if self._is_seeded else None
            params = sampling_params(request, self._stop_token_ids, seed)
            outputs = await vllm_requests.add(self._llm, request, params, cache_salt=str(self.policy_version))
            task = asyncio.create_task(self._finish(request, outputs, started_s))
            self._in_flight[task] = request.id
            task.add_done_callback(self._in_flight.pop)

    async def _finish(self, request: RolloutRequest, outputs: RequestOutputCollector, started_s: float) -> None:
        try:
            rollout = await vllm_requests.finished(
                self.name, request, outputs, started_s, version=lambda: self.policy_version
            )
            self._finished.append(rollout)  # after the wait: `collect` replaces the list
        except Exception as error:  # noqa: BLE001  any request without a rollout loses the engine
            self._lose(f"request {request.id} failed: {error!r}")
        self._news.set()

    def _check_alive(self) -> None:
        if self._lost is not None:
            raise self._lost
        if self._llm.errored:
            raise self._lose("vLLM reports a dead EngineCore")
        silent_s = self._counters.silent_s()
        owes = (bool(self._in_flight) and not self._paused) or self._ping is not None
        waits = owes and not self._num_calls
        if self._pulse.frozen(silent_s=silent_s if waits else 0.0, now_s=time.monotonic()):
            raise self._lose(f"frozen: no answer for {silent_s:.1f} s, and none of its processes computes")
        if self._in_flight and not self._paused and silent_s > self.config.deadline_s:
            raise self._lose(f"no token for {silent_s:.1f} s with {len(self._in_flight)} requests in flight")

    async def _ask_for_life(self) -> None:
        self._counters.touch()
        try:
            await self._llm.collective_rpc("paceline_processes")
        except Exception as error:  # noqa: BLE001  any error means an unsound engine
            self._lose(f"its workers do not answer: {error!r}")
        finally:
            self._counters.touch()
            self._ping = None

    async def _ask(self, *answers: Coroutine[Any, Any, Any]) -> list[Any]:
        """Await answers needed for metrics only: a timeout does not lose the engine."""
        try:
            return await asyncio.wait_for(asyncio.gather(*answers), self.config.call_deadline_s)
        except TimeoutError:
            raise PacelineError(f"engine {self.name} did not report its counters in time") from None

    def _lose(self, why: str) -> EngineLostError:
        if self._lost is None:
            self._lost = EngineLostError(self.name, why)
        return self._lost

    async def _call(self, what: str, answer: Coroutine[Any, Any, T], deadline_s: float | None = None) -> T:
        from vllm.v1.engine.exceptions import EngineDeadError

        if self._lost is not None:
            answer.close()
            raise self._lost
        deadline_s = deadline_s or self.config.call_deadline_s
        self._num_calls += 1
        try:
            return await asyncio.wait_for(answer, deadline_s)
        except TimeoutError:
            raise self._lose(f"{what} did not answer within {deadline_s:.1f} s") from None
        except EngineDeadError:
            raise self._lose(f"EngineCore died during {what}") from None
        finally:
            self._num_calls -= 1


def _descendants(strangers: Collection[int | None]) -> list[psutil.Process]:
    """Return children of this process that are not in `strangers`, with their descendants."""
    found: list[psutil.Process] = []
    for child in multiprocessing.active_children():
        if child.pid in strangers:
            continue
        with suppress(psutil.NoSuchProcess):  # it may end meanwhile
            process = psutil.Process(child.pid)
            found += [*process.children(recursive=True), process]
    return found


def _kill(processes: Sequence[psutil.Process]) -> None:
    """Kill processes and wait until they are gone. psutil recognizes reused process ids."""
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(processes, timeout=_CLOSE_DEADLINE_S)
