"""The drafter inside vLLM's worker: its proposer, and the weights that it shares with the policy.

Relies on
    vllm/v1/worker/gpu_worker.py            Worker.get_model, get_draft_model, speculative_config
    vllm/v1/worker/gpu_model_runner.py      GPUModelRunner.drafter

because vLLM does not say which of a drafter's weights it has replaced by the policy's (vllm/v1/spec_decode/ does so
when they are equal), nor give out a custom proposer. A worker method that names shared weights would let the first go.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker


def proposer(worker: Worker) -> object | None:
    """What proposes tokens in this worker; None without speculation."""
    return None if worker.speculative_config is None else worker.model_runner.drafter


def shared_with_policy(worker: Worker) -> set[str]:
    """Layers with weights that are one object in both models, by the names that a drafter's checkpoint has for them."""
    drafter = worker.get_draft_model()
    assert drafter is not None, "asked only of an engine with a learned drafter"
    policy_weights = {id(weight) for weight in worker.get_model().parameters()}
    return {name.split(".")[-2] for name, weight in drafter.named_parameters() if id(weight) in policy_weights}
