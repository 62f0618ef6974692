"""The drafter's weights inside vLLM's worker: which of them it shares with the policy.

Relies on vllm/v1/worker/gpu_worker.py: Worker.get_model and get_draft_model, which both model runners answer, because
vLLM does not say which of a drafter's weights it has replaced by the policy's (it does so when they are equal). A
worker method that names shared weights would let this go.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker


def shared_with_policy(worker: Worker) -> set[str]:
    """Layers with weights that are one object in both models, by the names that a drafter's checkpoint has for them."""
    drafter = worker.get_draft_model()
    assert drafter is not None, "asked only of an engine with a learned drafter"
    policy_weights = {id(weight) for weight in worker.get_model().parameters()}
    return {name.split(".")[-2] for name, weight in drafter.named_parameters() if id(weight) in policy_weights}
