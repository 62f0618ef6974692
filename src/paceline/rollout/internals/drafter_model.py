"""Tell the drafter's own weights in vLLM's worker from those shared with the policy.

vLLM replaces a drafter's weights by the policy's if they are equal, and does not report which. Before 0.26 the worker
has no get_draft_model, and before 0.30 the V2 runner does not read `draft_load_config`
(vllm/v1/worker/gpu/spec_decode/eagle/utils.py).

Relied upon:
  vllm/v1/worker/gpu_worker.py                       Worker.get_model and get_draft_model, with both model runners
  vllm/model_executor/models/qwen3_dflash.py         names of tensors derived from weights
  vllm/config/speculative.py                         SpeculativeConfig.draft_model_config and target_model_config, equal
                                                     for MTP heads in the policy's checkpoint

Goes when a worker method names shared weights.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from paceline.rollout.internals.model_runner import proposer
from paceline.rollout.internals.version import is_known

if TYPE_CHECKING:
    import torch
    from vllm.config import SpeculativeConfig
    from vllm.v1.worker.gpu_worker import Worker

_MODEL_FREE = ("ngram", "ngram_gpu", "suffix", "custom_class")
_DERIVED = ("_fused_kv_weight", "_fused_kv_bias", "_k_norm_weights")
"""Tensors derived from the weights of a DFlash drafter, neither parameters nor buffers."""


def shared_with_policy(worker: Worker) -> set[str]:
    """Return the drafter layers with weights that are the same object in both models, by checkpoint name."""
    drafter = worker.get_draft_model()
    assert drafter is not None, "asked only of an engine with a learned drafter"
    policy_weights = {id(weight) for weight in worker.get_model().parameters()}
    return {name.split(".")[-2] for name, weight in drafter.named_parameters() if id(weight) in policy_weights}


def is_learned(speculation: SpeculativeConfig | None) -> bool:
    """Return whether the drafter may have weights."""
    return speculation is not None and speculation.method not in _MODEL_FREE


def loads_apart() -> bool:
    """Return whether vLLM loads a drafter from its checkpoint if the policy has dummy weights."""
    import vllm
    from vllm import envs
    from vllm.platforms import current_platform

    return is_known(vllm.__version__) or current_platform.is_cpu() or envs.VLLM_USE_V2_MODEL_RUNNER is False


def comes_with_policy(speculation: SpeculativeConfig | None) -> bool:
    """Return whether the drafter is the MTP heads in the policy's checkpoint."""
    if speculation is None or speculation.method != "mtp":
        return False
    return speculation.draft_model_config.model == speculation.target_model_config.model


def own_weights(worker: Worker) -> dict[str, torch.Tensor]:
    """Return the drafter's tensors outside the policy's memory; empty without a learned drafter."""
    if hasattr(worker, "get_draft_model"):
        drafter = worker.get_draft_model()
    else:
        drafter = getattr(proposer(worker), "model", None)
    if drafter is None:
        return {}
    policy = worker.get_model()
    taken = {weight.untyped_storage().data_ptr() for weight in chain(policy.parameters(), policy.buffers())}
    found = dict(chain(drafter.named_parameters(), drafter.named_buffers()))
    for path, module in drafter.named_modules():
        found |= {f"{path}.{name}": vars(module)[name] for name in _DERIVED if vars(module).get(name) is not None}
    # The CPU backend leaves an empty tensor in place of a packed weight.
    return {
        name: weight
        for name, weight in found.items()
        if weight.numel() and weight.untyped_storage().data_ptr() not in taken
    }
