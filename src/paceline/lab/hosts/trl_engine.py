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

    engine: Any = vllm_generation.LLM
    vllm_generation.LLM = partial(engine, dtype=dtype)
