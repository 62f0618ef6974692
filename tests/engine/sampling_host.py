"""Somebody else's program: stock `vllm.LLM` samples a policy, several times for each prompt. PACELINE in its
environment, or not; what was sampled goes to a file for the two-sample test.

python tests/engine/sampling_host.py MODEL OUT.npz SEED
"""

import os
import sys
from itertools import islice
from typing import Any

import numpy as np
from transformers import AutoTokenizer
from vllm import LLM, SamplingParams, TokensPrompt

from paceline.arena.task import problems

NUM_PROMPTS, SAMPLES, TOKENS = 12, 192, 32


def main(model: str, out: str, seed: str) -> None:
    llm = LLM(model=model, max_model_len=512, max_num_seqs=64, seed=int(seed), gpu_memory_utilization=0.2)
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    prompts: Any = [
        TokensPrompt(prompt_token_ids=tokenizer(problem.prompt)["input_ids"])
        for problem in islice(problems(77), NUM_PROMPTS)
    ]
    params = SamplingParams(temperature=1.0, max_tokens=TOKENS, n=SAMPLES, detokenize=False)
    ids = np.full((NUM_PROMPTS, SAMPLES, TOKENS), -1, np.int32)
    for which, output in enumerate(llm.generate(prompts, params, use_tqdm=False)):
        for number, completion in enumerate(output.outputs):
            ids[which, number, : len(completion.token_ids)] = completion.token_ids
    verified = 0.0
    if os.environ.get("PACELINE"):
        (counters,) = llm.collective_rpc("paceline_counters")
        verified = counters["selector/verifications"]
    np.savez(out, ids=ids, verified=verified)


if __name__ == "__main__":
    main(*sys.argv[1:])
