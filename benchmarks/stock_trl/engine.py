"""What a bench changes in TRL's colocated engine, from outside of TRL."""

from __future__ import annotations

from functools import partial
from typing import Any


def set_dtype(dtype: str) -> None:
    """Let TRL's engines compute in this precision from now on.

    TRL passes none, and on CPUs vLLM then chooses bfloat16, which those without instructions for it compute three times
    slower than float32. The arms of a bench compute alike, in what is fastest on the machine.
    """
    from trl.generation import vllm_generation

    module: Any = vllm_generation
    module.LLM = partial(module.LLM, dtype=dtype)


def sync_on_cpu(trainer: Any) -> None:
    """Give a trainer in colocated mode a weight sync for the CPU, where TRL's writes into parameters that vLLM has
    packed."""
    generation = trainer.vllm_generation

    def sync_weights() -> None:
        weights = list(generation._iter_named_params())
        generation.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        generation.llm.reset_prefix_cache()

    generation.sync_weights = sync_weights
