"""examples/vllm_drafter as its README says, and the chat prompts of examples/gsm8k, on a server of stock vLLM."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foreign_python import foreign_environment, make_foreign_python
from paceline import assets
from paceline.cli import main
from paceline.config import JsonlData
from paceline.orchestrator.reward_worker import load
from paceline.orchestrator.task import load_task
from paceline.sessions.train import load_tokenizer
from serving import API_SERVER, served

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL = shlex.split("--enforce-eager --max-model-len 256 --max-num-seqs 8 --kv-cache-memory-bytes 100000000")
ASK = EXAMPLES / "vllm_drafter" / "ask.py"
fetch = runpy.run_path(str(ASK))["fetch"]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python without Paceline."""
    return make_foreign_python(tmp_path_factory.mktemp("foreign"))


@pytest.fixture(scope="module")
def server(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The server of the README's commands, but for the training: with the drafter that comes with the policy."""
    directory = tmp_path_factory.mktemp("served")
    block = re.search(r"```bash\n(.*?)```", (EXAMPLES / "vllm_drafter" / "README.md").read_text(), re.DOTALL)
    assert block, "no commands in the README"
    _, train, export, serve = (shlex.split(line) for line in block[1].splitlines())
    assert train[-1] == export[3] and train[:3] == ["paceline", "draft", "train"]
    out = directory / export[4]
    assert main([*export[1:3], str(assets.drafter("tiny", "eagle3")), str(out)]) == 0
    assert serve[:6] == ["vllm", "serve", "$POLICY", "--host", "127.0.0.1", "--speculative-config"]
    speculation = json.loads(serve[6])
    assert speculation["model"] == export[4]
    command = [python, *API_SERVER[1:], assets.policy("tiny"), serve[5], json.dumps(speculation | {"model": str(out)})]
    with served([*command, *SMALL], env=foreign_environment(), log=directory / "log") as url:
        yield url


def test_the_server_drafts_and_the_reader_is_told_how_well(server: str, python: Path) -> None:
    done = subprocess.run(
        [python, ASK, server], env=foreign_environment(), capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.count("####") >= 6, "the policy answers most of the problems"
    found = re.search(r"^(\d\.\d\d) tokens per verification$", done.stdout, re.MULTILINE)
    assert found and float(found[1]) > 1.5, done.stdout


def test_chat_prompts_of_gsm8k_are_those_that_the_server_makes_and_answers_earn_rewards(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chat template that differs between training and serving asks the policy what it never learned."""
    pytest.importorskip("math_verify", reason="the reward needs math-verify")
    monkeypatch.chdir(EXAMPLES.parent)
    data = JsonlData(path=Path("examples/gsm8k/train.jsonl"), reward="examples/gsm8k/reward.py:reward")
    task = load_task(data, load_tokenizer(assets.policy("tiny")), seed=0, num_heldout=8)
    model = json.loads(fetch(f"{server}/v1/models"))["data"][0]["id"]
    reward, _ = load("examples/gsm8k/reward.py", "reward")
    rewards = []
    for prompt in task.heldout:
        chat: dict[str, Any] = {"model": model, "messages": prompt.row["prompt"]}
        assert json.loads(fetch(f"{server}/tokenize", chat))["tokens"] == prompt.token_ids.tolist()
        order = chat | {"max_tokens": 128, "temperature": 0}
        said = json.loads(fetch(f"{server}/v1/chat/completions", order))["choices"][0]["message"]["content"]
        rewards.append(reward(prompt.text, said, prompt.row))
    assert set(rewards) <= {0.0, 1.0} and sum(rewards) >= 2
