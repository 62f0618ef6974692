"""Identify vLLM's model runner of an engine or worker, and its sampler and drafter.

    V1   vllm/v1/worker/gpu_model_runner.py    CPUs, and GPUs where V2 lacks a feature     `drafter`
    V2   vllm/v1/worker/gpu/model_runner.py    the default on GPUs since vLLM 0.32         `speculator`

Relied upon: `use_v2_model_runner` of vLLM's config (vllm/config/vllm.py) and of the worker
(vllm/v1/worker/gpu_worker.py); `drafter` or `speculator`, `sampler` and `rejection_sampler` of the runner. Goes when V1
goes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, cast

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.worker.gpu_worker import Worker

Runner = Literal["v1", "v2"]


def planned_runner(args: AsyncEngineArgs) -> Runner:
    """Return the runner of an engine with these arguments: vLLM decides by environment, platform and features."""
    return "v2" if args.create_engine_config().use_v2_model_runner else "v1"


def runner_version(worker: Worker) -> Runner:
    return "v2" if worker.use_v2_model_runner else "v1"


def proposer(worker: Worker) -> object | None:
    """Return the drafter of this worker, None without speculation."""
    if worker.speculative_config is None:
        return None
    runner = cast("Any", worker.model_runner)
    return runner.speculator if runner_version(worker) == "v2" else runner.drafter


def sampler(worker: Worker) -> object:
    """Return the sampler of this worker, under speculation the rejection sampler."""
    runner = cast("Any", worker.model_runner)
    return runner.sampler if worker.speculative_config is None else runner.rejection_sampler
