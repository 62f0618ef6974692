"""Train a checkpoint that is not the arena's on data that is not the arena's, as `examples/own_task` does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.metrics import read_metrics
from random_policy import make_policy, save_tokenizer

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "run.steps=1",
    "rollout.num_engines=1",
    "rollout.prompts_per_step=4",
    "rollout.group_size=2",
    "rollout.max_tokens=16",
    "rollout.engine.max_num_seqs=8",
    "rollout.engine.kv_cache_gb=0.05",
    "eval.num_prompts=2",
]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(make_policy(tmp_path_factory.mktemp("policy")))


def test_a_checkpoint_is_trained_on_own_data(policy: Path, tmp_path: Path) -> None:
    settings = [f'policy.model="{policy}"', f'run.directory="{tmp_path}"', *SMALL]
    command = [sys.executable, "-m", "paceline.cli", "train", "examples/own_task/config.toml", *settings]
    trained = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=1200)  # noqa: PLW1510  see below
    assert trained.returncode == 0, trained.stderr[-3000:]
    (line,) = trained.stderr.splitlines()  # nothing of vLLM, Ray or PyTorch
    assert line.startswith("run directory ")
    assert (tmp_path / "own-task" / "policy" / "step-1" / "model.safetensors").is_file()
    records = read_metrics(tmp_path / "own-task" / "metrics.jsonl")
    assert [record["step"] for record in records["texts"]] == [0, 1]
    assert records["texts"][0]["texts"][0]["prompt"].startswith("start ")
    assert "Answers to held-out prompts" in (tmp_path / "own-task" / "report.html").read_text()
