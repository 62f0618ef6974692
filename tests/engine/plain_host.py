"""Somebody else's program: stock `vllm.LLM`, which names nothing of ours. Says what it wrote and what ran it.

Only one token is allowed, which n-grams predict. The engine's core is in this process, so that its scheduler can be
asked.
"""

import json
import sys
from typing import Any

from vllm import LLM, SamplingParams, TokensPrompt


def main(model: str, arguments: str) -> None:
    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=4,
        kv_cache_memory_bytes=100_000_000,
        enable_chunked_prefill=False,
        max_num_batched_tokens=2048,
        **json.loads(arguments),
    )
    params = SamplingParams(temperature=1.0, allowed_token_ids=[7], max_tokens=60, ignore_eos=True, detokenize=False)
    prompts = [TokensPrompt(prompt_token_ids=[5, 6, number]) for number in range(8, 12)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    client: Any = llm.llm_engine.engine_core
    scheduler = client.engine_core.scheduler
    config = llm.llm_engine.vllm_config
    speculative = config.speculative_config
    answer = {
        "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
        "scheduler": type(scheduler).__name__,
        "counters": scheduler.counters() if hasattr(scheduler, "counters") else {},
        "speculation": [speculative.method, speculative.num_speculative_tokens] if speculative is not None else None,
        "additional_config": config.additional_config,
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
