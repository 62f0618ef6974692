"""Our side of one vLLM engine: requests in, finished rollouts out, a deadline on everything.

    submit ──▶ AsyncLLM ──zmq──▶ EngineCore ── worker(s)       processes of vLLM's own, children of this one
                  │
    collect ◀── finished rollouts, each exactly once

An engine is either good or lost, and a lost one stays lost: every method raises the same EngineLostError from then on, and the
owner closes it and sends its requests elsewhere. It is lost when vLLM says so, when a call does not answer in time, when requests
are in flight and no token comes for `progress_deadline_s` (a frozen EngineCore passes vLLM's own health check), and when vLLM gives
up on a request: nothing here ever aborts one, so an aborted request means that the engine is being torn down, and dropping it
silently would leave its group incomplete for ever.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import psutil

from paceline.config import EngineConfig, SpeculationConfig
from paceline.precision import ROUTERS
from paceline.rollout import compat
from paceline.rollout.sampler import refuse_lossy
from paceline.rollout.speculation import FP8_WEIGHTS, Speculation, check_drafter, scheduler_class, speculative_config
from paceline.types import EngineLostError, PacelineError, Receipt, Rollout, RolloutRequest

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestOutputCollector
    from vllm.v1.metrics.stats import IterationStats, SchedulerStats

    from paceline.rollout.transfer import Push

T = TypeVar("T")

_CLOSE_DEADLINE_S = 10.0
# vLLM reads the environment while it starts an engine, and a second engine in the same process may want another one.
_START_LOCK = threading.Lock()


class VllmEngine:
    """Implements `types.Engine`. All of it runs on the event loop that `start` ran on."""

    def __init__(
        self, name: str, llm: AsyncLLM, config: EngineConfig, *, counters: _Counters, stop_token_ids: Sequence[int]
    ) -> None:
        self.name = name
        self.policy_version = 0
        self.config = config
        self._vllm: AsyncLLM | None = llm
        self._counters = counters
        self._stop_token_ids = list(stop_token_ids)
        self._processes: list[psutil.Process] = []
        self._in_flight: set[asyncio.Task[None]] = set()
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
        trace: Path | None = None,
        stock_sampler: bool = False,
    ) -> VllmEngine:
        """Start vLLM's processes and wait until they can generate.

        `cpus` pins the workers' threads; None leaves them free. `trace` gets a JSON line for every step of a speculating engine.
        `stock_sampler` leaves vLLM's sampler as it is even where it is known to be wrong, to show that certify finds it.
        """
        path = Path(model_path)
        stop_token_ids = end_tokens(path)
        figures = None
        if speculation is not None:
            check_drafter(speculation, path, config)
            figures = Path(tempfile.gettempdir(), f"paceline-figures-{secrets.token_hex(8)}.json")
        counters = _Counters(figures)
        how = None if figures is None or speculation is None else Speculation(speculation, trace, figures, _off_file(figures))
        strangers = {child.pid for child in multiprocessing.active_children()}
        building = asyncio.to_thread(_build, path, config, seed, cpus, counters, how, stock_sampler)
        try:
            llm = await asyncio.wait_for(building, config.start_deadline_s)
        except TimeoutError:
            _kill(_descendants(strangers))
            raise EngineLostError(name, f"did not start within {config.start_deadline_s:.0f} s") from None
        except RuntimeError as error:
            raise EngineLostError(name, f"did not start: {error}") from error
        engine = cls(name, llm, config, counters=counters, stop_token_ids=stop_token_ids)
        try:
            pids = {pid for pair in await engine.rpc("paceline_processes") for pid in pair}
            engine._processes = [psutil.Process(pid) for pid in sorted(pids)]
            await engine._label(0)
            if speculation is not None and not stock_sampler and not all(await engine.rpc("sampler_is_sound")):
                raise PacelineError(
                    f"engine {name}: its sampler draws from a wrong distribution under speculation (vLLM issue 55005), because "
                    "vLLM did not load the plugin paceline_sampler that mends it; add it to VLLM_PLUGINS or unset that"
                )
        except BaseException:
            await engine.close()
            raise
        return engine

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
                await asyncio.wait_for(self._news.wait(), min(1.0, self.config.progress_deadline_s / 4))
            except TimeoutError:
                continue
            self._news.clear()
        finished, self._finished = self._finished, []
        return finished

    async def pause(self) -> None:
        await self._call("pause", self._llm.pause_generation(mode="keep", clear_cache=False))
        self._paused = True

    async def resume(self) -> None:
        await self._call("resume", self._llm.resume_generation())
        self._counters.touch()
        self._paused = False

    async def sleep(self) -> None:
        """Give memory back, on a GPU. The CPU backend of vLLM cannot, so there this only pauses."""
        if self._in_flight:
            raise PacelineError(
                f"engine {self.name}: cannot sleep with {len(self._in_flight)} requests, which would lose their KV cache"
            )
        if _on_cpu():
            await self.pause()
        else:
            await self._call("sleep", self._llm.sleep(level=1))

    async def wake(self) -> None:
        if _on_cpu():
            await self.resume()
        else:
            await self._call("wake", self._llm.wake_up())

    async def stop_speculation(self) -> None:
        """Draft nothing any more. The scheduler notices within about a second of its work."""
        self._counters.stop_speculation()

    async def metrics(self) -> Mapping[str, float]:
        self._check_alive()
        return self._counters.read()

    async def rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method of `worker.WorkerExtension` (or of vLLM's worker) on every worker; answers in order of rank."""
        return await self._call(method, self._llm.collective_rpc(method, args=args))

    async def receive(self, push: Push) -> Receipt:
        """Apply one push of weights; the wire and its guarantees are in transfer.py."""
        from paceline.rollout import transfer

        return await transfer.deliver(self, push)

    async def on_new_weights(self, version: int) -> None:
        """Tell the engine that its workers hold `version` now.

        Cached prefixes were computed by the old policy. Requests in flight hold such blocks too, and then vLLM can only drop them
        by computing those requests' KV cache anew; their tokens so far and the version of each token stay as they are.
        """
        if not await self._call("reset_prefix_cache", self._llm.reset_prefix_cache()):
            await self._call("reset_prefix_cache", self._llm.reset_prefix_cache(reset_running_requests=True))
        await self._label(version)

    async def close(self) -> None:
        self._lose("closed")
        llm, self._vllm = self._vllm, None
        if llm is None:
            return
        for task in tuple(self._in_flight):
            task.cancel()
        await asyncio.gather(*self._in_flight, return_exceptions=True)
        with suppress(TimeoutError):  # what is left of it is killed next
            await asyncio.wait_for(asyncio.to_thread(llm.shutdown, _CLOSE_DEADLINE_S / 2), _CLOSE_DEADLINE_S)
        await asyncio.to_thread(_kill, self._processes)
        self._counters.close()

    async def _label(self, version: int) -> None:
        await self._call("update_weight_version", self._llm.update_weight_version(str(version)))
        self.policy_version = version

    async def _add(self, requests: Sequence[RolloutRequest]) -> None:
        from vllm.inputs.engine import tokens_input

        for request in requests:
            started_s = time.monotonic()
            # Rendered input: a raw prompt would take a detour through vLLM's tokenizer threads.
            prompt = tokens_input(request.prompt_ids.tolist())
            params = sampling_params(request, self._stop_token_ids)
            outputs = await self._llm.add_request(f"{request.group_id}:{request.index}", prompt, params)
            task = asyncio.create_task(self._finish(request, outputs, started_s))
            self._in_flight.add(task)
            task.add_done_callback(self._in_flight.discard)

    async def _finish(self, request: RolloutRequest, outputs: RequestOutputCollector, started_s: float) -> None:
        try:
            output = cast("RequestOutput", await outputs.get())
            self._finished.append(_rollout(self.name, request, output, started_s))
        except Exception as error:  # noqa: BLE001  whatever ends a request without a rollout ends the engine
            self._lose(f"request {request.group_id}:{request.index} failed: {error!r}")
        self._news.set()

    def _check_alive(self) -> None:
        if self._lost is not None:
            raise self._lost
        if self._llm.errored:
            raise self._lose("vLLM reports a dead EngineCore")
        silent_s = self._counters.silent_s()
        if self._in_flight and not self._paused and silent_s > self.config.progress_deadline_s:
            raise self._lose(f"no token for {silent_s:.1f} s with {len(self._in_flight)} requests in flight")

    def _lose(self, why: str) -> EngineLostError:
        if self._lost is None:
            self._lost = EngineLostError(self.name, why)
        return self._lost

    async def _call(self, what: str, answer: Coroutine[Any, Any, T]) -> T:
        from vllm.v1.engine.exceptions import EngineDeadError

        if self._lost is not None:
            answer.close()
            raise self._lost
        try:
            return await asyncio.wait_for(answer, self.config.call_deadline_s)
        except TimeoutError:
            raise self._lose(f"{what} did not answer within {self.config.call_deadline_s:.1f} s") from None
        except EngineDeadError:
            raise self._lose(f"EngineCore died during {what}") from None


class _Counters:
    """vLLM's statistics of each step, summed. Given to vLLM as its stat logger: it sees tokens that FINAL_ONLY hides from us."""

    def __init__(self, figures: Path | None) -> None:
        self._figures = figures
        self._heard_s = time.monotonic()
        self._totals = dict.fromkeys(("generated_tokens", "preemptions", "drafted_tokens", "accepted_tokens"), 0.0)
        self._now = dict.fromkeys(("running_requests", "waiting_requests", "kv_usage"), 0.0)

    def touch(self) -> None:
        """Start the wait for the next token here."""
        self._heard_s = time.monotonic()

    def silent_s(self) -> float:
        return time.monotonic() - self._heard_s

    def read(self) -> dict[str, float]:
        figures = {f"engine/{key}": value for key, value in (self._totals | self._now).items()}
        if self._figures is not None and self._figures.is_file():
            believed = json.loads(self._figures.read_text(encoding="utf-8"))
            figures |= {f"selector/{key}": value for key, value in believed.items()}
        return figures

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: object = None,
        engine_idx: int = 0,
    ) -> None:
        if iteration_stats is not None:
            if iteration_stats.num_generation_tokens:
                self.touch()
            self._totals["generated_tokens"] += iteration_stats.num_generation_tokens
            self._totals["preemptions"] += iteration_stats.num_preempted_reqs
        if scheduler_stats is not None:
            self._now["running_requests"] = scheduler_stats.num_running_reqs
            self._now["waiting_requests"] = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            self._now["kv_usage"] = scheduler_stats.kv_cache_usage
            if scheduler_stats.spec_decoding_stats is not None:
                self._totals["drafted_tokens"] += scheduler_stats.spec_decoding_stats.num_draft_tokens
                self._totals["accepted_tokens"] += scheduler_stats.spec_decoding_stats.num_accepted_tokens

    def stop_speculation(self) -> None:
        if self._figures is not None:
            _off_file(self._figures).touch()

    def close(self) -> None:
        if self._figures is not None:
            self._figures.unlink(missing_ok=True)
            _off_file(self._figures).unlink(missing_ok=True)

    def log(self) -> None:
        """vLLM asks for a log line; the numbers leave through `read` instead."""

    def log_engine_initialized(self) -> None:
        """As above."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """As above."""


def _off_file(figures: Path) -> Path:
    """Tells the scheduler, which leaves its figures beside it, to draft nothing."""
    return figures.with_suffix(".off")


def _rollout(engine: str, request: RolloutRequest, output: RequestOutput, started_s: float) -> Rollout:
    from vllm.logprobs import FlatLogprobs

    completion = output.outputs[0]
    if completion.finish_reason not in ("stop", "length"):
        raise PacelineError(f"vLLM ended it with {completion.finish_reason!r}")
    assert isinstance(completion.logprobs, FlatLogprobs)
    assert completion.weight_versions, "vLLM labels every token with the version set by _label"
    drafts = completion.spec_decode_metrics
    return Rollout(
        group_id=request.group_id,
        index=request.index,
        prompt_ids=request.prompt_ids,
        token_ids=np.asarray(completion.token_ids, np.int32),
        logp=np.asarray(completion.logprobs.logprobs, np.float32),
        finish_reason=completion.finish_reason,
        policy_version=int(completion.weight_versions[0].version),
        policy_version_end=int(completion.weight_versions[-1].version),
        engine=engine,
        started_s=started_s,
        finished_s=time.monotonic(),
        num_verifications=sum(drafts.histogram) if drafts is not None else 0,
        num_drafted=drafts.num_draft_tokens if drafts is not None else 0,
        num_accepted=sum(count * num for count, num in enumerate(drafts.histogram)) if drafts is not None else 0,
    )


def _build(
    path: Path,
    config: EngineConfig,
    seed: int,
    cpus: Sequence[int] | None,
    counters: _Counters,
    speculation: Speculation | None,
    stock_sampler: bool,
) -> AsyncLLM:
    """Blocks until EngineCore is ready; runs in a thread, so that the deadline can be kept."""
    with _START_LOCK:
        set_environment(config, cpus)
        if stock_sampler:
            os.environ["VLLM_PLUGINS"] = "paceline"  # and not paceline_sampler
        import vllm
        from vllm.v1.engine.async_llm import AsyncLLM

        compat.check_version(vllm.__version__)
        args = engine_args(path, config, seed, speculation)
        return AsyncLLM.from_engine_args(args, stat_loggers=[cast("Any", lambda *_: counters)])


def engine_args(model_path: Path, config: EngineConfig, seed: int, speculation: Speculation | None = None) -> AsyncEngineArgs:
    """The settings of the engine in vLLM's own words."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    cpu, fp8 = _on_cpu(), config.weights == "fp8"
    args = AsyncEngineArgs(
        model=str(model_path),
        skip_tokenizer_init=True,  # token ids in, token ids out
        dtype=config.dtype,
        seed=seed,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        tensor_parallel_size=config.tensor_parallel_size,
        enforce_eager=not config.compile,
        kv_cache_memory_bytes=int(config.kv_cache_gb * 2**30) if cpu else None,
        gpu_memory_utilization=config.gpu_memory_utilization,
        quantization=FP8_WEIGHTS if fp8 else None,
        # Besides what vLLM leaves alone by itself: embeddings, norms and the output head.
        quantization_config={"ignore": [f"*.{router}" for router in ROUTERS]} if fp8 else None,
        kv_cache_dtype="fp8" if config.kv_cache == "fp8" else "auto",
        enable_sleep_mode=not cpu,
        enable_prefix_caching=True,  # the rollouts of a group share their prompt
        # On the CPU, vLLM 0.32 dies ("CPU Generator does not use offset") when the prefill of a seeded request is cut in two.
        enable_chunked_prefill=not cpu,
        max_num_batched_tokens=max(2048, config.max_model_len) if cpu else None,
        logprobs_mode="processed_logprobs",  # the default is before temperature: not what tokens were drawn from
        generation_config="vllm",  # a checkpoint's own top_p or penalties would change the distribution behind our back
        weight_transfer_config=cast("Any", {"backend": "paceline_shm" if cpu else "paceline_nccl"}),
        worker_extension_cls="paceline.rollout.worker.WorkerExtension",
        disable_log_stats=True,  # vLLM's own loggers; ours stays
    )
    if speculation is not None:
        args.speculative_config = speculative_config(speculation.config, config)
        refuse_lossy(args.speculative_config)
        args.scheduler_cls = scheduler_class(speculation.config, cpu=cpu)
        args.additional_config = {"paceline": speculation.scheduler_settings()}
        args.per_request_spec_decode_metrics = "summary"
    return args


def sampling_params(request: RolloutRequest, stop_token_ids: Sequence[int]) -> SamplingParams:
    """One request in vLLM's own words."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=request.temperature,
        max_tokens=request.max_tokens,
        seed=request.seed,
        stop_token_ids=list(stop_token_ids),
        logprobs=0,  # of the sampled token and no other
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


def set_environment(config: EngineConfig, cpus: Sequence[int] | None, *, core_in_process: bool = False) -> None:
    """For vLLM's processes, which inherit it; vLLM reads some of it when it is imported."""
    if core_in_process:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["DO_NOT_TRACK"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["VLLM_ENGINE_READY_TIMEOUT_S"] = str(int(config.start_deadline_s) + 1)
    # A worker on the CPU does not end when it is asked to; after this long vLLM makes it end, in time to tidy up behind it.
    os.environ["VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if cpus is None:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        return
    per_worker, rest = divmod(len(cpus), config.tensor_parallel_size)
    if rest or not per_worker:
        raise ValueError(
            f"cpus: got {len(cpus)} for tensor_parallel_size {config.tensor_parallel_size}; must be a multiple because each worker "
            "gets the same number"
        )
    shares = [cpus[i : i + per_worker] for i in range(0, len(cpus), per_worker)]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, share)) for share in shares)
    os.environ["OMP_NUM_THREADS"] = str(per_worker)
    # vLLM cannot read back on the CPU what it compiled ahead of time and would compile at every start; its other cache works.
    os.environ.setdefault("VLLM_USE_AOT_COMPILE", "0")


def end_tokens(model_path: Path) -> list[int]:
    """End-of-sequence ids of a checkpoint. Without a tokenizer vLLM does not look for them."""
    for file in (model_path / "generation_config.json", model_path / "config.json"):
        if file.is_file():
            end = json.loads(file.read_text()).get("eos_token_id")
            if end is not None:
                return [end] if isinstance(end, int) else list(end)
    return []


def _descendants(strangers: Collection[int | None]) -> list[psutil.Process]:
    """Children of this process that are not among `strangers`, with their own children."""
    found: list[psutil.Process] = []
    for child in multiprocessing.active_children():
        if child.pid in strangers:
            continue
        with suppress(psutil.NoSuchProcess):  # it may end while we look
            process = psutil.Process(child.pid)
            found += [*process.children(recursive=True), process]
    return found


def _kill(processes: Sequence[psutil.Process]) -> None:
    """End processes for certain; returns when they are gone. psutil tells a process from a later one with the same id."""
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(processes, timeout=_CLOSE_DEADLINE_S)
