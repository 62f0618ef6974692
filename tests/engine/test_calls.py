"""Calls of ours in an engine that is not ours: a drafter is pushed by name, past the host's extension and backend."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from benchmarks.workload import random_drafter
from paceline import assets
from paceline.arena.task import problems
from paceline.rollout.calls import ServedDrafter

HOST = Path(__file__).with_name("calls_host.py")
SETTINGS = """
[speculation]
max_draft_length = 4
drafter = {{kind = "eagle3", path = "{drafter}"}}
selector = {{kind = "fixed", draft_length = 4}}
"""


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("host")
    policy, drafter = assets.policy("tiny"), assets.drafter("tiny", "eagle3")
    random_drafter(drafter, directory / "random", seed=3)
    (directory / "speculation.toml").write_text(SETTINGS.format(drafter=drafter))
    tokenizer = AutoTokenizer.from_pretrained(policy)
    prompts = [tokenizer(problem.prompt)["input_ids"] for problem in islice(problems(1), 8)]
    variables = {
        "PACELINE": str(directory / "speculation.toml"),
        "PYTHONPATH": os.pathsep.join([str(HOST.parents[1]), os.environ.get("PYTHONPATH", "")]),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    command = [sys.executable, str(HOST), *map(str, (policy, drafter, directory / "random")), json.dumps(prompts)]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith('{"facts"')]
    return json.loads(line)["facts"]


def test_engine_tells_its_drafter_beside_the_hosts_extension(facts: dict[str, Any]) -> None:
    assert facts["theirs"] == ["still here"]
    (described,) = facts["described"]
    drafter = ServedDrafter(**described)
    assert drafter == ServedDrafter(
        problem=None, checkpoint=str(assets.drafter("tiny", "eagle3")), kind="eagle3", draft_length=4
    )


def test_pushed_drafter_drafts_and_damage_is_refused(facts: dict[str, Any]) -> None:
    """Weights that go into a copy which nobody reads would leave the old drafter at work without a word."""
    assert facts["random_answer"]["refused"] is None and facts["random_matches"]
    assert facts["random"] < 0.5 * facts["loaded"]
    assert "its bytes changed on the way" in facts["damaged_answer"]["refused"]
    assert facts["damaged"] == pytest.approx(facts["random"], rel=0.02)
    assert facts["pushed_answer"]["refused"] is None
    assert facts["pushed"] == pytest.approx(facts["loaded"], rel=0.02)
    assert facts["same_words"], "a drafter changes no token"


def test_push_counts_as_a_version_and_is_not_undone(facts: dict[str, Any]) -> None:
    """The host reloads its policy after the push."""
    assert facts["version"] == 3 and facts["restored"] == 0


def test_sampler_of_a_host_is_monitored(facts: dict[str, Any]) -> None:
    """The plugin installs the monitor in the host's worker, before any call."""
    (figures,) = facts["monitor"]
    assert figures["monitor/tokens"] > 0 and figures["monitor/failures"] == 0
    assert figures["monitor/step_s"] > 1, "installed by the call that asked for it"
