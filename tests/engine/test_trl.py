"""Stock TRL on real engines: its GRPO trains, the drafter of its engine learns along, and the logs say so.

The short form of scripts/test-hosts.sh: examples/trl/train.py as it is, with TRL's engine in its own process and with a
server. Both start from a drafter of random weights.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM

from benchmarks.workload import random_drafter
from paceline import assets
from paceline.drafters.checkpoint import load
from paceline.weights.fingerprint import fingerprint
from serving import API_SERVER, TRL_FLAGS, complete, metrics, served

pytestmark = pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed (requirements/trl.txt)")

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "trl" / "train.py"
STEPS, BUDGET_S = 8, 6.0
POLICY, PROMPT = "tiny", "start 47 (1)+8 (2)-13 =\n"
SETTINGS = '[speculation]\nmax_draft_length = 4\ndrafter = {{kind = "eagle3", path = "{drafter}"}}\n'
Log = list[dict[str, Any]]


def environment(**variables: str) -> dict[str, str]:
    quiet = {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
    return {key: value for key, value in os.environ.items() if key != "PACELINE"} | quiet | variables


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("drafter") / "random"
    random_drafter(assets.drafter(POLICY, "eagle3"), path, seed=3)
    return path


def train(out: Path, drafter: Path, *options: str) -> Log:
    """TRL's log of every step."""
    command = [sys.executable, EXAMPLE, "--model", assets.policy(POLICY), "--drafter", drafter, "--out", out]
    command += ["--steps", str(STEPS), "--budget", str(BUDGET_S), "--learning-rate", "1e-4", *options]
    done = subprocess.run(
        list(map(str, command)), env=environment(), capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "Paceline trains no drafter" not in done.stderr and "Paceline's callback" not in done.stderr, done.stderr
    history: Log = json.loads((out / "trainer_state.json").read_text())["log_history"]
    return history[:STEPS]


def check(log: Log, out: Path, drafter: Path) -> None:
    """What must hold in both modes."""
    assert [step["step"] for step in log] == list(range(1, STEPS + 1))
    failures = ("draft/failures", "draft/hand_over_failures", "draft/restore_failures", "selector/failures")
    assert [(key, step[key]) for step in log for key in (*failures, "draft/restored") if step[key]] == []
    # The engine rounds TRL's float32 weights to bfloat16 and computes in it, which alone makes 1e-4 at the start and up
    # to 1e-3 later. With this learning rate a policy that did not arrive shows.
    gaps = [step["mismatch/k3"] for step in log]
    assert max(gaps) < 0.01, gaps
    assert all("sampling/sampling_logp_difference/max" in step for step in log), "TRL's own stand beside ours"
    spent_s = [step["draft/training_s"] for step in log if "draft/training_s" in step]
    assert sum(spent_s) < 2 * (len(spent_s) + 2) * BUDGET_S, spent_s
    verdicts = [step for step in log if "draft/heldout_after" in step]
    assert verdicts and log[-1]["draft/published_round"] >= 1, log[-1]
    # How much it learns in so many seconds depends on the machine, and a drafter that holds is not trained.
    assert verdicts[-1]["draft/heldout_after"] > verdicts[0]["draft/heldout_before"], verdicts
    overlaps = [step["draft/overlap"] for step in log if "draft/overlap" in step]
    assert overlaps[-1] > overlaps[0], overlaps
    saved, start = load(out / "drafter").state_dict(), load(drafter).state_dict()
    assert saved.keys() == start.keys() and fingerprint(saved["fc.weight"]) != fingerprint(start["fc.weight"])
    trained = AutoModelForCausalLM.from_pretrained(out / "policy").state_dict()
    before = AutoModelForCausalLM.from_pretrained(assets.policy(POLICY)).state_dict()
    assert any(not trained[name].equal(weight) for name, weight in before.items()), "TRL's own training must go on"


def test_drafter_learns_along_with_a_colocated_engine(untrained: Path, tmp_path: Path) -> None:
    check(train(tmp_path, untrained), tmp_path, untrained)


@pytest.fixture(scope="module")
def server(untrained: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("server")
    file = directory / "speculation.toml"
    file.write_text(SETTINGS.format(drafter=untrained))
    variables = environment(PACELINE=str(file), VLLM_SERVER_DEV_MODE="1")
    with served([*API_SERVER, assets.policy(POLICY), *TRL_FLAGS], env=variables, log=directory / "log") as url:
        yield url


def test_drafter_learns_along_with_a_server(server: str, untrained: Path, tmp_path: Path) -> None:
    """Over HTTP: calls by name, the drafter and the policy through shared memory."""
    log = train(tmp_path, untrained, "--server", server)
    check(log, tmp_path, untrained)
    # Engines tell their metrics with a step, and the last publication may have come after the last one.
    complete(server, model=str(assets.policy(POLICY)), prompt=PROMPT, max_tokens=12, temperature=0)
    assert metrics(server)["paceline_draft_version"] == log[-1]["draft/published_round"]


def test_asynchronous_trainers_protocol_carries_the_policy(server: str) -> None:
    """What TRL's AsyncGRPOTrainer calls at every sync, in its order; after it the server must say other things."""
    from paceline.integrations.trl import WireTransfer

    policy = AutoModelForCausalLM.from_pretrained(assets.policy(POLICY), dtype=torch.float32)
    weights = {name: weight.detach().clone() for name, weight in policy.named_parameters()}
    other = weights | {"lm_head.weight": weights["lm_head.weight"].roll(1, 0)}  # every token is another
    PartialState()  # TRL's trainers have made one before they make their client, whose logger asks for it
    transfer = WireTransfer(server)
    transfer.init_weight_transfer()

    def said_with(sent: dict[str, torch.Tensor]) -> str:
        transfer.pause()
        transfer.send_weights(iter(sent.items()))
        transfer.resume()
        answer = complete(server, model=str(assets.policy(POLICY)), prompt=PROMPT, max_tokens=12, temperature=0)
        return answer["choices"][0]["text"]

    said = said_with(weights)
    assert said_with(other) != said == said_with(weights)
    transfer.destroy()


def test_trl_has_what_the_callback_relies_on() -> None:
    """A canary: says in seconds what a new TRL has moved."""
    from trl.experimental.async_grpo.async_grpo_trainer import WeightTransferProtocol
    from trl.generation.vllm_client import VLLMClient
    from trl.generation.vllm_generation import VLLMGeneration

    from paceline.integrations.trl import WireClient, WireTransfer
    from trl import GRPOTrainer  # pyright: ignore[reportPrivateImportUsage]  public in its docs

    source = inspect.getsource(GRPOTrainer)
    for text in (
        "model(**model_inputs, labels=labels, fused_lm_head=True)",
        "outputs.log_probs",
        "self._buffered_inputs = ",
        'output["old_per_token_logps"]',
        'output["sampling_per_token_logps"]',
        "self._metrics[mode].items()",
        "self.args.gradient_accumulation_steps % generate_every != 0 or (",
        "self.vllm_generation.sync_weights()",
    ):
        assert text in source, f"integrations/trl.py: {text} is gone"
    generation = inspect.getsource(VLLMGeneration)
    for text in (
        "self.llm = LLM(",
        "self.vllm_client = VLLMClient(",
        "self.llm.sleep(level=2)",
        "self.enable_sleep_mode",
    ):
        assert text in generation, f"integrations/trl.py: {text} is gone"
    assert callable(VLLMGeneration._iter_named_params)
    for name in ("init_communicator", "update_named_params", "close_communicator"):
        mine, stock = (inspect.signature(getattr(client, name)) for client in (WireClient, VLLMClient))
        assert list(mine.parameters) == list(stock.parameters), name
    wanted = {name for name in vars(WeightTransferProtocol) if not name.startswith("_")}
    assert wanted <= {name for name in vars(WireTransfer) if callable(getattr(WireTransfer, name))}, wanted
