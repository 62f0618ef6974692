"""vLLM's settings for our engines: arguments, sampling parameters, and the environment of its processes."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from paceline.config import EngineConfig, SpeculationConfig
from paceline.config.gpu import refuse_fp8_on_gpu
from paceline.fp8 import ROUTERS
from paceline.rollout.internals.model_runner import planned_runner
from paceline.rollout.internals.platform import has_amx, on_cpu
from paceline.rollout.speculation import (
    FP8_WEIGHTS,
    SCHEDULER,
    Unhashed,
    graph_plan,
    refuse_lossy,
    scheduler_settings,
    speculative_config,
)
from paceline.types import PacelineError, RolloutRequest

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs


def engine_args(
    model_path: Path, config: EngineConfig, seed: int, speculation: SpeculationConfig | None = None
) -> AsyncEngineArgs:
    """Return vLLM's arguments for one engine."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    # PACELINE fills in arguments of other hosts (hosts.py). Here the config decides.
    os.environ.pop("PACELINE", None)
    cpu, fp8 = on_cpu(), config.weights == "fp8"
    compiles = config.compiles(gpu=not cpu)
    if not cpu:
        refuse_fp8_on_gpu(config)
    elif not has_amx():
        _refuse_fp8_weights(config, speculation)
    args = AsyncEngineArgs(
        model=str(model_path),
        skip_tokenizer_init=True,  # token ids in, token ids out
        dtype=config.dtype,
        seed=seed,
        max_model_len=config.max_model_len,
        max_num_seqs=1 if config.deterministic else config.max_num_seqs,
        tensor_parallel_size=config.tensor_parallel_size,
        distributed_executor_backend=_executor(config),
        enforce_eager=not compiles,
        kv_cache_memory_bytes=int(config.kv_cache_gb * 2**30) if cpu else None,
        gpu_memory_utilization=config.gpu_memory_utilization,
        quantization=FP8_WEIGHTS if fp8 else None,
        # In addition to vLLM's own exceptions: embeddings, norms and the output head.
        quantization_config={"ignore": [f"*.{router}" for router in ROUTERS]} if fp8 else None,
        kv_cache_dtype="fp8" if config.kv_cache == "fp8" else "auto",
        enable_sleep_mode=not cpu,
        # Rollouts of a group share their prompt. Cached prefixes change the last bit of results.
        enable_prefix_caching=not config.deterministic,
        # Only whole blocks are shared, and vLLM's default of 128 tokens on CPUs exceeds many prompts. Its CPU kernels
        # need multiples of 32.
        block_size=32 if cpu else None,
        # On the CPU, vLLM 0.32 crashes ("CPU Generator does not use offset") if the prefill of a seeded request is
        # split.
        enable_chunked_prefill=not cpu,
        max_num_batched_tokens=max(2048, config.max_model_len) if cpu else None,
        logprobs_mode="processed_logprobs",  # the default is before temperature
        generation_config="vllm",  # ignore top_p and penalties of the checkpoint: they change the distribution
        weight_transfer_config=cast("Any", {"backend": "paceline"}),
        worker_extension_cls="paceline.rollout.worker.WorkerExtension",
        disable_log_stats=True,  # vLLM's own loggers; ours stays
    )
    if speculation is not None:
        # Without graphs, the scheduler may use any draft length.
        plan = None if cpu or not compiles else graph_plan(speculation, config)
        args.speculative_config = speculative_config(speculation, config, plan)
        refuse_lossy(args.speculative_config)
        if plan is not None:
            args.compilation_config.cudagraph_capture_sizes = plan.capture_sizes
        args.scheduler_cls = SCHEDULER
        args.additional_config = cast("Any", Unhashed(scheduler_settings(speculation, plan)))
        args.per_request_spec_decode_metrics = "summary"
        if speculation.verification == "coupled" and not cpu and planned_runner(args) == "v1":
            raise ValueError(
                f"speculation.verification: got 'coupled' with drafter {speculation.drafter.kind}; must be 'standard' "
                "because vLLM runs this engine on V1, which is deprecated on GPUs and draws by generators"
            )
    return args


def _executor(config: EngineConfig) -> str | None:
    """Return the executor, None for vLLM's default."""
    if config.tensor_parallel_size > 1:
        # Inside a placement group vLLM's default is its Ray executor, which refuses our bundles of several GPUs.
        return "mp"
    return "paceline.rollout.internals.executor.InProcessExecutor" if on_cpu() else None


def _refuse_fp8_weights(config: EngineConfig, speculation: SpeculationConfig | None) -> None:
    drafter = None if speculation is None else speculation.drafter
    for section, weights in (
        ("rollout.engine", config.weights),
        ("speculation.drafter", getattr(drafter, "weights", "")),
    ):
        if weights == "fp8":
            raise PacelineError(
                f"{section}.weights: got 'fp8' on a CPU without AMX; must be 'full' because vLLM's FP8 kernels for "
                "CPUs need AMX (Sapphire Rapids or newer)"
            )


def sampling_params(request: RolloutRequest, stop_token_ids: Sequence[int], seed: int | None) -> SamplingParams:
    """Return vLLM's sampling parameters of one request."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=request.temperature,
        max_tokens=request.max_tokens,
        seed=seed,
        logit_bias=None if request.logit_bias is None else dict(request.logit_bias),
        stop_token_ids=list(stop_token_ids),
        logprobs=0,  # of the sampled token only
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def leave_sampler_stock() -> None:
    """Have vLLM load our plugin without the sampler fix, in this process and its children."""
    os.environ["VLLM_PLUGINS"] = "paceline"


def set_environment(config: EngineConfig, cpus: Sequence[int] | None, *, core_in_process: bool = False) -> None:
    """Set the environment of vLLM's processes; vLLM reads parts of it on import."""
    if core_in_process:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["DO_NOT_TRACK"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["VLLM_ENGINE_READY_TIMEOUT_S"] = str(int(config.start_deadline_s) + 1)
    # CPU workers ignore the shutdown request; vLLM kills them after this time and can still clean up.
    os.environ["VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if cpus is None:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    else:
        _bind_threads(cpus, config.tensor_parallel_size)
    if on_cpu():  # last: it imports a part of vLLM
        # On the CPU vLLM cannot load ahead-of-time compiled code and recompiles at every start; its other cache works.
        os.environ.setdefault("VLLM_USE_AOT_COMPILE", "0")


def _bind_threads(cpus: Sequence[int], num_workers: int) -> None:
    """Give each worker the same number of cores."""
    per_worker = len(cpus) // num_workers
    if not per_worker:
        raise ValueError(
            f"cpus: got {len(cpus)} for tensor_parallel_size {num_workers}; must be at least as many because each "
            "worker needs its own core"
        )
    shares = [cpus[rank * per_worker :][:per_worker] for rank in range(num_workers)]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, share)) for share in shares)
    os.environ["OMP_NUM_THREADS"] = str(per_worker)


def end_tokens(model_path: Path) -> list[int]:
    """Return the end-of-sequence ids of a checkpoint: vLLM does not read them without a tokenizer."""
    for file in (model_path / "generation_config.json", model_path / "config.json"):
        if file.is_file():
            end = json.loads(file.read_text()).get("eos_token_id")
            if end is not None:
                return [end] if isinstance(end, int) else list(end)
    return []
