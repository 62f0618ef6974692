"""Somebody else's program: stock `vllm.LLM` with a worker extension of its own and no weight-transfer backend. Pushes
drafters by name, and says what came of it. PACELINE in its environment brings drafter and scheduler.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams, TokensPrompt

from paceline.drafters.rounds import drafter_weights
from paceline.rollout.calls import COUNTERS, DRAFTER, MONITOR, PUSH
from paceline.weights.shared_memory import ShmSender


class Host:
    def __init__(self, model: str, prompts: list[list[int]]) -> None:
        self.llm = LLM(
            model=model,
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=256,
            max_num_seqs=8,
            kv_cache_memory_bytes=100_000_000,
            worker_extension_cls="host_extension.HostExtension",
        )
        self.prompts: Any = [TokensPrompt(prompt_token_ids=ids) for ids in prompts]
        self.sender = ShmSender()

    def counters(self) -> dict[str, float]:
        (answer,) = self.call(COUNTERS)
        return answer

    def call(self, method: str, *args: Any) -> list[Any]:
        return self.llm.collective_rpc(method, args=args)

    def accepted(self) -> tuple[float, list[list[int]]]:
        """Accepted tokens per verification, greedily, and what was said."""
        start = self.counters()
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, detokenize=False)
        outputs = self.llm.generate(self.prompts, params, use_tqdm=False)
        end = self.counters()
        accepted, verified = (end[key] - start[key] for key in ("selector/accepted_tokens", "selector/verifications"))
        return accepted / verified, [list(output.outputs[0].token_ids) for output in outputs]

    def push(self, path: str, version: int, *, damaged: bool = False) -> tuple[dict[str, Any], dict[str, str]]:
        """The worker's answer, and the fingerprints that were sent."""
        weights = drafter_weights(Path(path) / "model.safetensors")
        push = self.sender.stage(version, weights.items(), target="drafter")
        if damaged:
            entry = replace(push.entries[0], fingerprint="0" * 32)
            push = replace(push, entries=(entry, *push.entries[1:]))
        message = json.loads(json.dumps(push.to_dict()))  # as a server gets it
        (answer,) = self.call(PUSH, message)
        return answer, push.fingerprints_of(0)


def main(model: str, drafter: str, random: str, prompts: str) -> None:
    host = Host(model, json.loads(prompts))
    facts: dict[str, Any] = {"theirs": host.call("theirs"), "described": host.call(DRAFTER)}
    facts["loaded"], said = host.accepted()
    facts["random_answer"], sent = host.push(random, 1)
    facts["random_matches"] = facts["random_answer"]["fingerprints"] == sent
    facts["random"], _ = host.accepted()
    facts["damaged_answer"], _ = host.push(drafter, 2, damaged=True)
    facts["damaged"], _ = host.accepted()
    facts["pushed_answer"], _ = host.push(drafter, 3)
    host.call("reload_weights")  # of the policy, by the host: the pushed drafter must stay
    facts["pushed"], said_then = host.accepted()
    facts["same_words"] = said == said_then
    facts["version"] = host.counters()["draft/version"]
    facts["restored"] = host.counters()["draft/restored"]
    facts["monitor"] = host.call(MONITOR)
    host.sender.close()
    print(json.dumps({"facts": facts}))


if __name__ == "__main__":
    main(*sys.argv[1:])
