"""A sidecar beside vLLM's own API server: from an untrained drafter to one whose drafts are accepted, over HTTP."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from benchmarks.workload import random_drafter
from paceline import assets
from paceline.arena.task import problems
from paceline.drafters.rounds import drafter_weights
from paceline.integrations import engine_wire
from paceline.integrations.engine_wire import EngineWire, http_rpc
from paceline.metrics import read_metrics
from paceline.rollout.calls import COUNTERS, ENDPOINT
from serving import API_SERVER, complete, metrics, served

SETTINGS = """
[speculation]
max_draft_length = 4
drafter = {{kind = "eagle3", path = "{drafter}"}}
selector = {{kind = "fixed", draft_length = 4}}
"""
FLAGS = {
    "--middleware": "paceline.rollout.endpoint.CallsEndpoint",
    "--dtype": "float32",
    "--max-model-len": "256",
    "--max-num-seqs": "32",
    "--kv-cache-memory-bytes": "200000000",
}
TRAINING = ("when=always", "learning_rate=0.1", "tokens_per_step=512", "round_tokens=4096")
DEADLINE_S = 240.0
VARIABLES = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    url: str
    directory: Path

    def sample(self, first: int, num: int) -> tuple[float, list[dict[str, Any]]]:
        """Accepted length while it answers arena problems, and the rollouts."""
        tokenizer = AutoTokenizer.from_pretrained(assets.policy("tiny"))
        prompts = [tokenizer(problem.prompt)["input_ids"] for problem in islice(problems(5), first, first + num)]
        wire = EngineWire(http_rpc(self.url))
        start = wire.counters()
        answer = complete(self.url, prompt=prompts, max_tokens=100, temperature=1.0, return_token_ids=True)
        end = wire.counters()
        accepted, verified = (end[key] - start[key] for key in ("selector/accepted_tokens", "selector/verifications"))
        rows = [
            {"prompt_ids": prompts[choice["index"]], "response_ids": choice["token_ids"]}
            for choice in answer["choices"]
        ]
        return 1 + accepted / verified, rows


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("server")
    random_drafter(assets.drafter("tiny", "eagle3"), directory / "random", seed=3)
    (directory / "speculation.toml").write_text(SETTINGS.format(drafter=directory / "random"))
    command = [*API_SERVER, assets.policy("tiny"), *(part for flag in FLAGS.items() for part in flag)]
    env = os.environ | VARIABLES | {"PACELINE": str(directory / "speculation.toml")}
    with served([*command, "--enforce-eager"], env=env, log=directory / "log") as url:
        yield Server(url=url, directory=directory)


def run_until(enough: float, words: list[object], cache: Path) -> str:
    """Run a sidecar until it publishes a drafter of this accepted length on held-out rollouts, and end it by SIGTERM;
    returns what it said."""
    command = [sys.executable, "-m", "paceline.cli", "sidecar", *map(str, words)]
    env = os.environ | {"PACELINE_CACHE": str(cache)}
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        deadline = threading.Timer(DEADLINE_S, process.kill)
        deadline.start()
        said: list[str] = []
        good = False
        for line in process.stderr:
            said.append(line)
            judged = re.search(r"accepted length .* -> ([\d.]+) on held-out rollouts, published", line)
            good = good or (judged is not None and float(judged[1]) >= enough)
            if good and line.startswith("round"):  # it was pushed and recorded
                process.send_signal(signal.SIGTERM)
                break
        said += process.stderr
        deadline.cancel()
        assert process.wait() == 0, "".join(said)
    return "".join(said)


def test_sidecar_trains_the_servers_drafter(server: Server, tmp_path: Path) -> None:
    """Over stock /collective_rpc. What a push changed is seen in what the server accepts, and nowhere else."""
    before, rows = server.sample(0, 300)
    (tmp_path / "rollouts").mkdir()
    lines = [f"{json.dumps(row)}\n" for row in rows]
    (tmp_path / "rollouts" / "1.jsonl").write_text("".join(lines) + "half a li")
    words = ["--server", server.url, "--rollouts", tmp_path / "rollouts", "--policy", assets.policy("tiny")]
    words += ["--out", tmp_path / "out", "--metrics", tmp_path / "sidecar.jsonl", "--period", 4, "--share", 1]
    said = run_until(1.1, [*words, *(f"speculation.training.{word}" for word in TRAINING)], tmp_path)
    after, _ = server.sample(300, 100)
    steps = [record["metrics"] for record in read_metrics(tmp_path / "sidecar.jsonl")["step"]]
    assert steps[0]["draft/new_rollouts"] == 300 and steps[-1]["draft/broken_lines"] == 0
    assert sum(step["draft/failures"] for step in steps) == 0, said
    version = EngineWire(http_rpc(server.url)).counters()["draft/version"]
    assert version == steps[-1]["draft/published_round"] == metrics(server.url)["paceline_draft_version"] >= 1
    # Some 5,000 verifications: a mean of them is uncertain by 0.005.
    assert after > before + 0.04, said


def test_endpoint_takes_a_push_from_whoever_has_the_token(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a server without dev mode is asked. The drafter of the arena must be at work afterward."""
    call = json.dumps({"method": COUNTERS}).encode()
    for token in ("", "wrong"):
        header = {"Authorization": f"Bearer {token}"}
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(urllib.request.Request(server.url + ENDPOINT, call, header), timeout=60)
    monkeypatch.setattr(engine_wire, "_COLLECTIVE_RPC", "/not_there")
    wire = EngineWire(http_rpc(server.url))
    assert wire.drafter().kind == "eagle3"
    version = int(wire.counters()["draft/version"]) + 1
    trained = drafter_weights(assets.drafter("tiny", "eagle3") / "model.safetensors")
    wire.push(version, trained.items(), "drafter")
    wire.close()
    assert wire.counters()["draft/version"] == version
    assert server.sample(400, 50)[0] > 2
