"""Somebody else's program: stock vLLM with our scheduler named in its settings, and nothing of ours imported.

In the first batch only one token is allowed, which n-grams predict. In the second, at a high temperature, nothing can
be predicted, but the prompts hold every token, so that there is always something to propose. So long drafts pay first
and cost then. The third is greedy, so that its answers can be checked.
"""

import json
import sys

from vllm import LLM, SamplingParams, TokensPrompt


def main(model: str, trace: str) -> None:
    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=8,
        kv_cache_memory_bytes=100_000_000,
        enable_chunked_prefill=False,
        max_num_batched_tokens=2048,
        scheduler_cls="paceline.rollout.scheduler.AdaptiveScheduler",
        speculative_config={
            "method": "ngram",
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 4,
            "num_speculative_tokens": 4,
        },
        additional_config={"paceline": {"trace": trace}},
    )
    prompts = [TokensPrompt(prompt_token_ids=[*range(2, 96), 5 + number, 6]) for number in range(8)]
    batches = {
        "predictable": SamplingParams(
            temperature=1.0, allowed_token_ids=[7], max_tokens=300, ignore_eos=True, detokenize=False
        ),
        "noise": SamplingParams(temperature=2.0, max_tokens=300, ignore_eos=True, detokenize=False),
        "greedy": SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, detokenize=False),
    }
    answers = {}
    for name, params in batches.items():
        outputs = llm.generate(prompts, params, use_tqdm=False)
        answers[name] = [list(output.outputs[0].token_ids) for output in outputs]
    print(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
