"""Paceline without paceline.lab: training one's own checkpoint on one's own data needs no arena."""

from __future__ import annotations

import os
import shutil
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
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as it would be installed, without the lab."""
    site = tmp_path_factory.mktemp("site")
    ignored = shutil.ignore_patterns("lab", "__pycache__")
    shutil.copytree(ROOT / "src" / "paceline", site / "paceline", ignore=ignored)
    return site


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(make_policy(tmp_path_factory.mktemp("policy")))


def run(package: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(package)}
    # The examples are named from the top of the project, which holds no package: src/ does.
    return subprocess.run(  # noqa: PLW1510  the caller looks at the exit code
        [sys.executable, *map(str, command)], capture_output=True, text=True, cwd=ROOT, env=environment, timeout=1200
    )


def test_the_lab_is_not_there_and_whoever_needs_it_says_so(package: Path) -> None:
    found = run(package, "-c", "import paceline; print(paceline.__file__); import paceline.lab")
    assert found.stdout.startswith(str(package)) and "No module named 'paceline.lab'" in found.stderr
    for command in (["bench", "control"], ["arena", "rebuild", "--out", "nowhere"], ["demo"]):
        refused = run(package, "-m", "paceline.cli", *command)
        assert refused.returncode == 2 and "the lab" in refused.stderr and "Traceback" not in refused.stderr
    refused = run(package, "-m", "paceline.cli", "train", "configs/arena.toml")
    assert refused.returncode == 2
    assert "policy.model: got 'arena:small', but there is no workload 'arena'" in refused.stderr


def test_a_checkpoint_is_trained_without_the_lab(package: Path, policy: Path, tmp_path: Path) -> None:
    settings = [f'policy.model="{policy}"', f'run.directory="{tmp_path}"', *SMALL]
    trained = run(package, "-m", "paceline.cli", "train", "examples/own_task/config.toml", *settings)
    assert trained.returncode == 0, trained.stderr[-3000:]
    (line,) = trained.stderr.splitlines()  # nothing of vLLM, Ray or PyTorch
    assert line.startswith("run directory ")
    assert (tmp_path / "own-task" / "policy" / "step-1" / "model.safetensors").is_file()
    records = read_metrics(tmp_path / "own-task" / "metrics.jsonl")
    assert [record["step"] for record in records["texts"]] == [0, 1]
    assert records["texts"][0]["texts"][0]["prompt"].startswith("start ")
    assert "Answers to held-out prompts" in (tmp_path / "own-task" / "report.html").read_text()
