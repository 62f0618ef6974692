"""`paceline doctor` on a policy and drafters that come with the package: a sound machine passes, and planted faults are
found by the right checks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.doctor.examine import CHECKS, name_of

HOST = Path(__file__).parent / "doctor_host.py"
NAMES = [name_of(check) for checks in CHECKS.values() for check in checks]


pytestmark = pytest.mark.timeout(900)  # one engine per test, on a machine that may be busy


def run(directory: Path, command: list[str], *words: str) -> tuple[int, dict[str, Any], str]:
    """Return exit code, result and output of a process of its own: the learner changes torch's settings."""
    file = directory / "doctor.json"
    command = [sys.executable, *command, *words, "rollout.engine.kv_cache_gb=0.25", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)  # noqa: PLW1510  asserted by the tests
    assert file.is_file(), done.stderr[-3000:]
    return done.returncode, json.loads(file.read_text(encoding="utf-8")), done.stdout + done.stderr


def test_everything_that_a_cpu_can_do_passes(tmp_path: Path) -> None:
    page = tmp_path / "doctor.html"
    code, result, printed = run(tmp_path, ["-m", "paceline.cli", "doctor"], "--html", str(page))
    found = {check["name"]: check for check in result["details"]["checks"]}
    assert (code, result["details"]["failed"]) == (0, []), printed[-4000:]
    assert list(found) == NAMES
    skipped = {name for name, check in found.items() if check["status"] == "skipped"}
    assert skipped == {"gpu-memory-free"}, {name: found[name]["evidence"] for name in skipped}
    assert result["figures"]["checks"] == len(NAMES) - 1
    assert f"{len(NAMES)}/{len(NAMES)} {NAMES[-1]}" in printed, "no progress was printed"
    assert "everything works" in page.read_text(encoding="utf-8")


def test_planted_faults_are_found_by_the_right_checks(tmp_path: Path) -> None:
    """A wrong sampler, a drafter of another policy, and damaged pushes, all at once: one failure hides no other."""
    only = "start,generate,sampler,accepted-length,log-probabilities,push,broadcast"
    code, result, printed = run(tmp_path, [str(HOST), "sampler,drafter,push"], "--only", only)
    found = {check["name"]: check for check in result["details"]["checks"]}
    assert (code, result["details"]["failed"]) == (1, ["sampler", "accepted-length", "push", "broadcast"]), printed[
        -4000:
    ]
    for name in ("push", "broadcast"):
        assert "embed_tokens" in found[name]["evidence"] or "weight" in found[name]["evidence"], found[name]


def test_run_for_gpus_that_the_cluster_does_not_have_fails(tmp_path: Path) -> None:
    code, result, printed = run(tmp_path, ["-m", "paceline.cli", "doctor"], "--only", "ray", "cluster.device=gpu")
    assert (code, result["details"]["failed"]) == (1, ["ray"]), printed[-4000:]
