"""The drafter's weights inside vLLM's worker: which of them it shares with the policy, and which are its own.

Relies on vllm/v1/worker/gpu_worker.py: Worker.get_model and get_draft_model, which both model runners answer, because
vLLM does not say which of a drafter's weights it has replaced by the policy's (it does so when they are equal), and on
names in vllm/model_executor/models/qwen3_dflash.py, which derives tensors from weights; on
vllm/config/speculative.py: SpeculativeConfig.draft_model_config and target_model_config, which name one checkpoint
where MTP heads are a part of the policy's. A worker method that names shared weights would let this go. Before vLLM
0.26 the worker has no get_draft_model, and before 0.30 the V2 runner does not read `draft_load_config`
(vllm/v1/worker/gpu/spec_decode/eagle/utils.py).
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
"""Tensors that a DFlash drafter has made from its weights, neither parameters nor buffers."""


def shared_with_policy(worker: Worker) -> set[str]:
    """Layers with weights that are one object in both models, by the names that a drafter's checkpoint has for them."""
    drafter = worker.get_draft_model()
    assert drafter is not None, "asked only of an engine with a learned drafter"
    policy_weights = {id(weight) for weight in worker.get_model().parameters()}
    return {name.split(".")[-2] for name, weight in drafter.named_parameters() if id(weight) in policy_weights}


def is_learned(speculation: SpeculativeConfig | None) -> bool:
    """Whether a drafter with weights of its own may be at work."""
    return speculation is not None and speculation.method not in _MODEL_FREE


def loads_apart() -> bool:
    """Whether vLLM gives a drafter the weights of its checkpoint where it gives the policy dummies."""
    import vllm
    from vllm import envs
    from vllm.platforms import current_platform

    return is_known(vllm.__version__) or current_platform.is_cpu() or envs.VLLM_USE_V2_MODEL_RUNNER is False


def comes_with_policy(speculation: SpeculativeConfig | None) -> bool:
    """Whether the drafter is the MTP heads of the policy's own checkpoint."""
    if speculation is None or speculation.method != "mtp":
        return False
    return speculation.draft_model_config.model == speculation.target_model_config.model


def own_weights(worker: Worker) -> dict[str, torch.Tensor]:
    """Everything of the drafter's that does not lie in the policy's memory; nothing without a learned drafter."""
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
    # The CPU backend leaves an empty tensor where it has packed a weight.
    return {
        name: weight
        for name, weight in found.items()
        if weight.numel() and weight.untyped_storage().data_ptr() not in taken
    }
