"""The stand-ins that let V2 run here: each is still needed, and where it would come too late that is said."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from benchmarks import v2_runner

ASK = """
import json
from benchmarks.v2_runner import STAND_INS
print(json.dumps({replacement.name: replacement.needed() for replacement in STAND_INS}))
"""


def python(code: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """A process without stand-ins: PYTHONPATH is not this one's, where they stand."""
    inherited = {name: value for name, value in os.environ.items() if name not in v2_runner._SETTINGS}
    environment = inherited | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)} | settings
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


def test_every_stand_in_is_still_needed() -> None:
    """A stand-in that Triton or vLLM no longer needs would replace what GPU users run."""
    answer = python(ASK, **v2_runner._SETTINGS)
    assert answer.returncode == 0, answer.stderr[-3000:]
    needed = json.loads(answer.stdout.splitlines()[-1])
    assert needed == dict.fromkeys(needed, True), "take these out of benchmarks/v2_runner.py"
    assert len(needed) == len(v2_runner.STAND_INS)


def test_stand_ins_are_refused_when_they_come_too_late() -> None:
    """Kernels that were defined before would be compiled for a GPU, and fail in the middle of a step."""
    answer = python(
        "import os, triton\n"
        "from benchmarks.v2_runner import v2_runner\n"
        "with v2_runner(os.environ, async_scheduling=True): pass"
    )
    assert answer.returncode == 1
    assert "triton imported before the stand-ins" in answer.stderr


def test_environment_is_restored() -> None:
    """Settings that stay would put a later V1 engine on V2."""
    environment = {"PYTHONPATH": "/somewhere", "TRITON_INTERPRET": "0"}
    before = dict(environment)
    with (
        pytest.raises(KeyError, match="from inside"),
        v2_runner.v2_runner(environment, async_scheduling=False),
    ):
        assert environment["TRITON_INTERPRET"] == environment["VLLM_USE_V2_MODEL_RUNNER"] == "1"
        assert environment["PYTHONPATH"].endswith("/somewhere")
        raise KeyError("from inside")
    assert environment == before
