"""Commands as a user runs them: they do what they say, and nothing but Paceline's own lines is seen."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest

from contexts import make_context
from paceline.demo.run import Size
from paceline.demo.run import run as run_demo
from random_policy import make_mtp_policy, make_policy, save_tokenizer
from serving import API_SERVER, complete, served

ROOT = Path(__file__).resolve().parents[2]
CONFIG = """
[policy]
model = "{policy}"
[data]
kind = "jsonl"
path = "{prompts}"
reward = "examples/own_task/reward.py:reward"
[rollout]
temperature = 0.7
max_tokens = 64
[rollout.engine]
max_model_len = 128
max_num_seqs = 32
kv_cache_gb = 0.05
"""
HEADS = """
[speculation]
drafter = {kind = "vllm", settings = {method = "mtp", draft_sample_method = "probabilistic"}}
max_draft_length = 3
"""


def own_config(directory: Path, policy: Path) -> Path:
    """Config of a checkpoint and prompts of one's own."""
    prompts = directory / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": loop * 6}) + "\n" for loop in ("abcd", "123", "+-+ ")))
    file = directory / "config.toml"
    file.write_text(CONFIG.format(policy=save_tokenizer(policy), prompts=prompts))
    return file


def paceline(*arguments: str | Path, own: str) -> str:
    """Run a command that must go well; every line on stderr must match `own`. Returns what it printed."""
    done = subprocess.run(  # noqa: PLW1510  looked at below
        [sys.executable, "-m", "paceline.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert [line for line in done.stderr.splitlines() if not re.match(own, line)] == []
    return done.stdout


def test_certify_says_what_a_checkpoint_can_be_trusted_with(tmp_path: Path) -> None:
    """A policy with MTP heads of its own, whose drafts have probabilities. With PACELINE_FULL set it is the whole
    certificate, which takes four minutes."""
    effort, verdict = ([], "LOSSLESS") if "PACELINE_FULL" in os.environ else (["--quick"], "INCONCLUSIVE")
    config = own_config(tmp_path, make_mtp_policy(tmp_path / "policy", step=11, noise=0.05))
    config.write_text(config.read_text() + HEADS)
    file, html = tmp_path / "result.json", tmp_path / "certificate.html"
    said = paceline("certify", config, *effort, "--json", file, "--html", html, own="sampler: |engines: |fp32: ")
    result = json.loads(file.read_text())
    figures, details, page = result["figures"], result["details"], html.read_text()
    assert details["failed"] == []
    assert all(details["logp_by_class"][kind]["count"] > 0 for kind in ("accepted", "recovered", "bonus"))
    assert figures["drafted_tokens"] > 1000 and figures["accepted_length"] > 2 and figures["greedy_differences"] == 0
    assert details["verdict"] == verdict and verdict in said, f"--quick, and only that, must not certify: {said}"
    for word in (verdict, result["environment"]["versions"]["torch"], "mtp"):
        assert word in page


def test_certify_logp_agrees_with_the_learner(tmp_path: Path) -> None:
    config, file = own_config(tmp_path, make_policy(tmp_path / "policy")), tmp_path / "result.json"
    paceline("certify", "logp", config, "--tokens", "200", "--json", file, own="fp32: |bf16: ")
    assert json.loads(file.read_text())["figures"]["fp32_max_abs"] < 1e-4


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter that the command has trained, from sampling on an engine to a checkpoint."""
    out = tmp_path_factory.mktemp("trained") / "drafter"
    said = paceline(
        *("draft", "train", "arena:tiny", "--tokens", "60000", "--out", out),
        own=r"sampling |trained |[\d,]+ tokens: accepted length ",
    )
    overlap = next(line for line in said.splitlines() if line.startswith("overlap"))
    assert float(overlap.split()[1]) > 0.2, "it read hidden states of other tokens: by chance one guess in 80 hits"
    return out


@pytest.fixture(scope="module")
def tuned(drafter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tune") / "tuned"
    settings = ["rollout.engine.max_num_seqs=4", "rollout.engine.kv_cache_gb=0.05", "rollout.engine.dtype=float32"]
    said = paceline(
        *("tune", "arena:tiny", *settings, "--drafter", drafter, "--out", out, "--passes", "1"),
        *("--json", out.with_name("result.json")),
        own="starting the engine|pass 1 of 1 ",
    )
    assert (out / "serve.sh").read_text().removeprefix("exec ").removesuffix(' "$@"\n') in said
    return out


def test_tune_says_which_draft_lengths_pay(tuned: Path) -> None:
    figures = json.loads(tuned.with_name("result.json").read_text())["figures"]
    assert figures["acceptance_1"] > 0.2
    assert {"best_length_1", "best_length_2", "best_length_4", "gain_4"} <= figures.keys()
    assert json.loads((tuned / "costs.json").read_text())["measured_on"]
    assert "Acceptance by draft position" in (tuned / "tune.html").read_text()


def test_what_tune_wrote_serves_the_model_with_drafts(tuned: Path, tmp_path: Path) -> None:
    """From another directory, as `sh tuned/serve.sh`; relative paths and names that vLLM does not know would fail."""
    stand_in = tmp_path / "vllm"
    stand_in.write_text(f'#!/bin/sh\ncd {tmp_path} && shift && exec {shlex.join(API_SERVER)} "$@"\n')
    stand_in.chmod(0o700)
    further = ["--max-model-len", "256", "--kv-cache-memory-bytes", "50000000"]
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    with served(["sh", tuned / "serve.sh", *further], env=env, log=tmp_path / "log") as url:
        answer = complete(url, prompt="start 45 (1)+1 (2)-6 =\n", max_tokens=60, ignore_eos=True)
        assert answer["usage"]["completion_tokens"] == 60
        with urlopen(f"{url}/metrics") as page:
            counted = re.search(r"^vllm:spec_decode_num_accepted_tokens_total\S* (\S+)$", page.read().decode(), re.M)
    assert counted and float(counted[1]) > 0


def test_demo_measures_compares_and_draws(tmp_path: Path) -> None:
    size = Size(model="arena:tiny", num_requests=3, longest=24, rl_steps=0, max_seconds=1e9)
    page = tmp_path / "demo.html"
    result = run_demo(context=make_context(), config_file=ROOT / "configs" / "demo.toml", page=page, size=size)
    plain, ours = result.details["timelines"]
    for timeline in (plain, ours):
        assert timeline["running"][-1] == 0 and timeline["num_tokens"] == sorted(timeline["num_tokens"])
    assert plain["num_tokens"][-1] == ours["num_tokens"][-1], "both do the same work"
    assert set(plain["draft_length"]) == {0} and max(ours["draft_length"]) > 0
    assert result.figures["speedup"] == plain["at_s"][-1] / ours["at_s"][-1]
    assert result.figures["equal_rollouts"] == 1.0 and result.figures["accepted_tokens"] > 0
    assert "3 of 3 rollouts" in page.read_text()
    assert f"{result.figures['speedup']:.2f}x" in page.read_text()
