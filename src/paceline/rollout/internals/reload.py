"""Loading new weights into a running model: vLLM's layerwise reload, and two of its gaps on the CPU backend.

Relies on
    vllm/model_executor/model_loader/reload/        initialize_layerwise_reload, finalize_layerwise_reload
    vllm/model_executor/model_loader/mtp_validation.py      disable_mtp_completeness_check
    vllm/model_executor/layers/vocab_parallel_embedding.py  ParallelLMHead, UnquantizedEmbeddingMethod

because vLLM's own transfer backends call the same functions, but begin the reload before the bytes have been checked. A
base class in vLLM for backends that receive first and load then would let this go.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch

from paceline.rollout.internals.platform import on_cpu


def load_weights(model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Begin a reload, which takes the old weights away, and load the new ones."""
    from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    initialize_layerwise_reload(model)
    with disable_mtp_completeness_check():
        cast("Any", model).load_weights(weights)


def finish_loading(model: torch.nn.Module, model_config: Any) -> None:
    """Pack, quantise and put into place what was loaded."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    finalize_layerwise_reload(model, model_config)
    _repack_tied_heads(model)


def reload_problem(method: str | None) -> str | None:
    """Why a drafter of this kind (vLLM's `speculative_config.method`) must not be reloaded, if it must not.

    vLLM 0.32 builds DFlash's context projection at the end of a reload, on the CPU from layers that it has packed by
    then and so emptied: the engine dies in its next step. tests/engine/test_drafters.py pushes one; this can go when
    that ends well.
    """
    if on_cpu() and method == "dflash":
        return "vLLM's CPU backend cannot take new weights of a DFlash drafter"
    return None


def _repack_tied_heads(model: torch.nn.Module) -> None:
    """Give an output head that is tied to the embedding the new weights, on the CPU.

    There vLLM computes a head from a packed copy of its weights and packs anew what a reload brings. To a tied head it
    brings nothing, so that goes on with the old embedding while everything else is new. Seen in vLLM 0.32; the policy
    of tests/engine/test_transfer.py is tied, so this can go when its log-probabilities are right without it.
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
