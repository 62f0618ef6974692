"""The CUDA graphs that a worker on vLLM's V2 runner has captured.

Relied upon: vllm/v1/worker/gpu/cudagraph_utils.py, `CudaGraphManager.graphs` by `BatchExecutionDescriptor` (`num_reqs`,
`num_tokens`); `cudagraph_manager` of the runner. `paceline doctor` compares them with what was asked for. Goes when
vLLM tells which graphs it has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from paceline.rollout.internals.model_runner import runner_version

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker


def captured_graphs(worker: Worker) -> list[tuple[int, int]]:
    """Requests and tokens of the step that each graph of the policy is for; none on V1, which does not tell."""
    if runner_version(worker) == "v1":
        return []
    manager = cast("Any", worker.model_runner).cudagraph_manager
    return sorted((step.num_reqs or 0, step.num_tokens) for step in (manager.graphs if manager is not None else ()))
