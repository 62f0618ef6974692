"""Somebody who does not have Paceline: stock vLLM with a drafter, greedy. Says what was written and what was
accepted."""

import json
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec


def main(order: str) -> None:
    wanted = json.loads(order)
    assert find_spec("paceline") is None, "Paceline can be imported here"
    plugins = [point.value for point in entry_points(group="vllm.general_plugins") if "paceline" in point.value]
    assert not plugins, f"vLLM would load {plugins}"

    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.v1.metrics.reader import Counter

    llm = LLM(
        model=wanted["policy"],
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=16,
        kv_cache_memory_bytes=100_000_000,
        speculative_config=wanted["speculative_config"],
        disable_log_stats=False,
    )
    params = SamplingParams(
        temperature=0.0, max_tokens=wanted["max_tokens"], stop_token_ids=wanted["stop_token_ids"], detokenize=False
    )
    outputs = llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in wanted["prompts"]], params, use_tqdm=False)
    counters = {metric.name: metric.value for metric in llm.get_metrics() if isinstance(metric, Counter)}
    assert not [name for name in sys.modules if name.split(".")[0] == "paceline"]
    answer = {
        "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
        "num_verifications": counters["vllm:spec_decode_num_drafts"],
        "num_accepted": counters["vllm:spec_decode_num_accepted_tokens"],
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
