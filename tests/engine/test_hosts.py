"""PACELINE in a program that knows nothing of us: stock `vllm.LLM` gets drafter and scheduler, or starts without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from random_policy import make_mtp_policy

HOST = Path(__file__).with_name("plain_host.py")
NGRAM = """
[speculation]
max_draft_length = 3
drafter = {kind = "ngram"}
selector = {kind = "fixed", draft_length = 2}
"""
HISTORY = NGRAM.replace("ngram", "history")


def run(policy_path: Path, setting: str, **arguments: Any) -> tuple[dict[str, Any], list[str]]:
    """What the program answered, and the lines that vLLM's log has of us."""
    assert "paceline" not in HOST.read_text().lower()
    variables = {
        "PACELINE": setting,
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    command = [sys.executable, str(HOST), str(policy_path), json.dumps(arguments)]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    answers = [line for line in done.stdout.splitlines() if line.startswith('{"token_ids"')]
    lines = [line for line in (done.stdout + done.stderr).splitlines() if f"PACELINE={setting}" in line]
    answer = json.loads(answers[-1])
    assert answer["token_ids"] == [[7] * 60] * 4
    return answer, lines


@pytest.mark.parametrize(("text", "method"), [(NGRAM, "ngram"), (HISTORY, "custom_class")])
def test_variable_alone_gives_drafter_and_scheduler(text: str, method: str, policy_path: Path, tmp_path: Path) -> None:
    """A host that passes no engine arguments on could not have either."""
    file = tmp_path / "speculation.toml"
    file.write_text(text)
    answer, lines = run(policy_path, str(file))
    assert answer["scheduler"] == "AdaptiveScheduler"
    assert answer["speculation"] == [method, 3]
    assert answer["counters"]["selector/steps_at_k2"] > 5
    assert answer["counters"]["selector/failures"] == 0
    # Drafts of two tokens that are all accepted: three tokens a step, where plain decoding has one.
    if method == "ngram":
        assert sum(value for key, value in answer["counters"].items() if key.startswith("selector/steps_at_k")) < 60
    (line,) = lines
    assert "fills in speculative_config, scheduler_cls, additional_config: drafter" in line


def test_automatic_setting_enables_mtp_heads_and_nothing_else(policy_path: Path, tmp_path: Path) -> None:
    answer, (line,) = run(make_mtp_policy(tmp_path / "heads", step=5), "auto")
    assert answer["speculation"] == ["mtp", 3] and answer["scheduler"] == "AdaptiveScheduler"
    assert answer["counters"]["selector/failures"] == 0
    assert "fills in speculative_config, scheduler_cls, additional_config: drafter vllm, up to 3 tokens" in line
    answer, (line,) = run(policy_path, "auto")
    assert answer["speculation"] is None and answer["scheduler"] == "Scheduler"
    assert "INFO" in line and "fills in nothing: the policy's checkpoint has no MTP heads" in line


def test_arguments_of_the_host_stay(policy_path: Path, tmp_path: Path) -> None:
    """Its own drafter is not replaced, and its settings for others are still there."""
    file = tmp_path / "speculation.toml"
    file.write_text(NGRAM.replace("draft_length = 2", "draft_length = 1"))
    theirs = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 2, "num_speculative_tokens": 1}
    answer, (line,) = run(
        policy_path, str(file), speculative_config=theirs, additional_config={"theirs": {"setting": 1}}
    )
    assert answer["speculation"] == ["ngram", 1]
    assert answer["additional_config"]["theirs"] == {"setting": 1}
    assert answer["scheduler"] == "AdaptiveScheduler"
    assert "the host's own speculation stays" in line


def test_unreadable_file_costs_speculation_and_not_the_engine(policy_path: Path, tmp_path: Path) -> None:
    file = tmp_path / "speculation.toml"
    file.write_text("[speculation")
    answer, (line,) = run(policy_path, str(file))
    assert answer["speculation"] is None and answer["scheduler"] == "Scheduler"
    assert "WARNING" in line and "fills in nothing: config: " in line and "is not TOML" in line
