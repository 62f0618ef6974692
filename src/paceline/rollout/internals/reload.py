"""Load new weights into a running model: vLLM's layerwise reload, and fixes of two gaps on the CPU backend.

vLLM's transfer backends call the same functions, but begin the reload before the bytes are checked.

Relied upon:
  vllm/model_executor/model_loader/reload/                initialize_layerwise_reload, finalize_layerwise_reload
  vllm/model_executor/model_loader/mtp_validation.py      disable_mtp_completeness_check
  vllm/model_executor/layers/vocab_parallel_embedding.py  ParallelLMHead, UnquantizedEmbeddingMethod

Goes when vLLM has a base class for backends that receive first and load then.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch

from paceline.rollout.internals.platform import on_cpu


def load_weights(model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Begin a reload, which frees the old weights, and load the new ones."""
    from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    initialize_layerwise_reload(model)
    with disable_mtp_completeness_check():
        cast("Any", model).load_weights(weights)


def finish_loading(model: torch.nn.Module, model_config: Any) -> None:
    """Pack and quantize the loaded weights and install them."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    finalize_layerwise_reload(model, model_config)
    _repack_tied_heads(model)


def reload_problem(method: str | None) -> str | None:
    """Return why a drafter of this kind (vLLM's `speculative_config.method`) cannot be reloaded, None if it can.

    vLLM 0.32 builds DFlash's context projection at the end of a reload, on the CPU from layers that are packed and
    empty by then: the engine crashes in its next step. Goes when tests/engine/test_drafters.py can push one.
    """
    if on_cpu() and method == "dflash":
        return "vLLM's CPU backend cannot take new weights of a DFlash drafter"
    return None


def _repack_tied_heads(model: torch.nn.Module) -> None:
    """Repack output heads that are tied to the embedding, on the CPU.

    vLLM's CPU backend computes a head from a packed copy and repacks loaded weights. A reload loads nothing into a tied
    head, so it would keep the old embedding. Seen in vLLM 0.32. Goes when the log-probabilities of the tied policy in
    tests/engine/test_transfer.py are right without it.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        UnquantizedEmbeddingMethod,
        VocabParallelEmbedding,
    )

    heads = [module for module in model.modules() if isinstance(module, ParallelLMHead)]
    embeddings = [
        module for module in model.modules() if isinstance(module, VocabParallelEmbedding) and module not in heads
    ]
    for head in heads:
        tied = any(head.weight is embedding.weight for embedding in embeddings)
        if tied and isinstance(head.quant_method, UnquantizedEmbeddingMethod):
            head.quant_method.process_weights_after_loading(head)  # does nothing on a GPU
