"""`paceline doctor` as a user runs it, on a policy and drafters that come with the package: what works passes, and each
planted trouble is called by its name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.doctor.examine import CHECKS

WITHOUT_GPU = {"gpu-memory-free", "nccl", "cuda-graphs"}
MAY_BE_SKIPPED = WITHOUT_GPU | {"torch-companions", "speculation", "engine-eagle3", "engine-fp8"}
"""On a CPU, without a config: EAGLE-3 is the drafter of the first engine, and FP8 needs AMX."""


pytestmark = pytest.mark.timeout(1600)  # five engines, one after another, on a machine that may be busy


def run(directory: Path, *words: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, result and what was printed. A process of its own: the learner changes torch's settings."""
    file = directory / "doctor.json"
    command = [sys.executable, "-m", "paceline.cli", "doctor", *words, "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500)  # noqa: PLW1510  asserted by the tests
    assert file.is_file(), done.stderr[-3000:]
    return done.returncode, json.loads(file.read_text(encoding="utf-8")), done.stdout + done.stderr


def test_everything_that_a_cpu_can_do_passes(tmp_path: Path) -> None:
    page = tmp_path / "doctor.html"
    code, result, printed = run(tmp_path, "rollout.engine.kv_cache_gb=0.25", "--html", str(page))
    found = {check["name"]: check for check in result["details"]["checks"]}
    assert (code, result["details"]["failed"]) == (0, []), printed[-4000:]
    assert list(found) == [check.name for check in CHECKS]
    skipped = {name for name, check in found.items() if check["status"] == "skipped"}
    assert skipped <= MAY_BE_SKIPPED and skipped >= WITHOUT_GPU, {name: found[name]["evidence"] for name in skipped}
    assert result["figures"]["checks"] == len(CHECKS) - len(skipped) >= 20
    assert f"{len(CHECKS)}/{len(CHECKS)} {CHECKS[-1].name}" in printed, "no progress was told"
    assert "everything works" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(("trouble", "name"), [("sampler", "sampler"), ("drafter", "accepted-length")])
def test_planted_trouble_is_called_by_its_name(tmp_path: Path, trouble: str, name: str) -> None:
    """The third, no room in shared memory, needs neither vLLM nor an engine: tests/unit/test_doctor.py."""
    code, result, printed = run(tmp_path, "--only", name, "--plant", trouble)
    assert (code, result["details"]["failed"]) == (1, [name]), printed[-4000:]
    assert f"FAILED   {name}" in printed
