"""The scheduler alone: stock vLLM that names it adapts, whatever else of ours is there. Runs on every supported
vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any

import pytest

from random_policy import make_policy
from serving import API_SERVER, complete, served

HOST = Path(__file__).with_name("host.py")
QUIET = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def steps(trace: Path) -> list[dict]:
    return [json.loads(line) for line in trace.read_text().splitlines()]


@pytest.fixture(scope="module")
def policy_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide enough that a token more to verify costs something."""
    return make_policy(tmp_path_factory.mktemp("policy"), hidden_size=512)


@pytest.fixture(scope="module")
def hosted(
    policy_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, list[list[int]]], list[dict]]:
    """Answers and trace of `vllm.LLM` in a program that knows nothing of us."""
    assert "paceline" not in HOST.read_text().split('"""')[2].replace("paceline.rollout.scheduler", "").replace(
        '"paceline"', ""
    )
    trace = tmp_path_factory.mktemp("hosted") / "steps.jsonl"
    command = [sys.executable, str(HOST), str(policy_path), str(trace)]
    done = subprocess.run(command, env=os.environ | QUIET, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), steps(trace)


def test_draft_length_follows_what_pays(hosted) -> None:
    """A table that is fixed at start would draft as much into noise as into a loop."""
    answers, trace = hosted
    assert [len(tokens) for tokens in answers["predictable"] + answers["noise"]] == [300] * 16
    assert answers["predictable"] == [[7] * 300] * 8
    batches = _batches(trace)
    # What counts is before the first request of a batch leaves.
    predictable, noise = ([step["drafted"] for step in batch if step["num_requests"] == 8] for batch in batches[:2])
    assert mean(predictable[-20:]) > 3
    assert mean(noise[-100:]) < 1


def _batches(trace: list[dict]) -> list[list[dict]]:
    """Steps of each batch; a batch begins with steps that compute prompts, after some that did not."""
    begins = [
        now
        for now in range(1, len(trace))
        if trace[now]["num_prefill_tokens"] and not trace[now - 1]["num_prefill_tokens"]
    ]
    return [trace[begin:end] for begin, end in pairwise([0, *begins, len(trace)])]


def test_greedy_answers_are_those_of_plain_vllm(hosted, policy_path: Path) -> None:
    """Drafts change what a step computes, never what the policy says."""
    import torch
    from transformers import Qwen3ForCausalLM

    answers, _ = hosted
    policy = Qwen3ForCausalLM.from_pretrained(policy_path)
    for number, tokens in enumerate(answers["greedy"]):
        prompt = [*range(2, 96), 5 + number, 6]
        with torch.no_grad():
            logits_TV = policy(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        top_T = logits_TV.max(-1).values
        taken_T = logits_TV[torch.arange(len(tokens)), torch.tensor(tokens)]
        assert (top_T - taken_T).max() < 1e-3  # the best token, or one that rounding cannot tell from it


def test_trace_accounts_for_every_token(hosted) -> None:
    """Token classes of certify, and the selector's acceptance, are read from these counts."""
    _, trace = hosted
    emitted: dict[str, int] = {}
    for step in trace:
        assert step["num_emitted"] == sum(num for _, _, num in step["requests"])
        assert sum(step["proposed_at"]) == sum(num for _, num, _ in step["requests"])
        assert sum(step["accepted_at"]) == step["num_emitted"] - len(step["requests"])
        for request, num_drafted, num_emitted in step["requests"]:
            assert 1 <= num_emitted <= num_drafted + 1
            emitted[request] = emitted.get(request, 0) + num_emitted
    # The last step of a request may accept tokens beyond max_tokens, which vLLM drops.
    assert sorted(60 if total < 100 else 300 for total in emitted.values()) == [60] * 8 + [300] * 16
    assert all(total in (*range(60, 65), *range(300, 305)) for total in emitted.values())


def test_draft_length_of_a_step_was_chosen_one_step_before(hosted) -> None:
    """Costs would be charged to the wrong draft length."""
    _, trace = hosted
    for before, after in pairwise(trace):
        if not after["num_prefill_tokens"]:
            assert after["verified"] <= before["drafted"]


@pytest.mark.parametrize("ahead", [False, True])
def test_scheduler_is_the_one_for_how_vllm_schedules(ahead: bool) -> None:
    """The synchronous one would wait for draft tokens that vLLM never hands over when it schedules ahead."""
    from paceline.rollout.scheduler import AdaptiveScheduler, AsyncAdaptiveScheduler

    make: Any = AdaptiveScheduler.__new__
    config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=ahead))
    assert type(make(AdaptiveScheduler, vllm_config=config)) is (AsyncAdaptiveScheduler if ahead else AdaptiveScheduler)


def test_server_adapts_with_two_flags(policy_path: Path, tmp_path: Path) -> None:
    """`vllm serve` is how most people run vLLM; settings must get through its command line."""
    trace = tmp_path / "steps.jsonl"
    flags = {
        "--scheduler-cls": "paceline.rollout.scheduler.AdaptiveScheduler",
        "--speculative-config": json.dumps(
            {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4, "num_speculative_tokens": 4}
        ),
        "--additional-config": json.dumps({"paceline": {"trace": str(trace)}}),
        "--dtype": "float32",
        "--max-model-len": "512",
        "--max-num-seqs": "8",
        "--kv-cache-memory-bytes": "100000000",
        "--max-num-batched-tokens": "2048",
    }
    command = [*API_SERVER, str(policy_path), *(part for flag in flags.items() for part in flag)]
    command += ["--enforce-eager", "--skip-tokenizer-init", "--no-enable-chunked-prefill"]
    with served(command, env=os.environ | QUIET, log=tmp_path / "log") as url:
        # Only one token is allowed: n-grams predict it.
        answer = complete(url, prompt=[5, 6, 7], max_tokens=200, allowed_token_ids=[7], ignore_eos=True)
        assert answer["usage"]["completion_tokens"] == 200
    assert mean(step["drafted"] for step in steps(trace)[-20:]) > 2
