"""Processes of other trainers: their environment, what they are asked, and how a failure is told."""

import hashlib
import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.stock_trl.process import ROOT, HostProcess, host_environment, trl_site
from paceline.context import Context
from paceline.types import PacelineError

PROGRAM = """
import json, os, sys
from benchmarks.stock_trl.process import answers, questions
answer = answers()
settings = json.loads(sys.argv[1])
print("vLLM says a lot", flush=True), os.system("echo and its children too")
answer({"ready": settings["name"]})
for question in questions():
    if question["add"] is None:
        raise SystemExit("it could not be added")
    answer({"sum": sum(question["add"])})
print("farewell", file=sys.stderr)
"""


@contextmanager
def started(directory: Path, program: str = PROGRAM) -> Iterator[HostProcess]:
    (directory / "some_host.py").write_text(program)
    environ = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(directory), str(ROOT), os.environ.get("PYTHONPATH", "")])
    }
    with HostProcess("some_host", {"name": "it"}, environ=environ, log=directory / "log") as host:
        yield host


def test_what_a_program_prints_is_no_answer(tmp_path: Path) -> None:
    """vLLM, TRL and the processes that they start all write to standard output."""
    with started(tmp_path) as host:
        assert host.read(deadline_s=60) == {"ready": "it"}
        assert host.ask({"add": [1, 2]}, deadline_s=60) == {"sum": 3}
        assert host.ask({"add": []}, deadline_s=60) == {"sum": 0}
    text = (tmp_path / "log").read_text()
    assert "vLLM says a lot" in text and "and its children too" in text
    assert "farewell" in text, "it was killed instead of being asked to end"


def test_end_of_the_log_tells_why_a_program_failed(tmp_path: Path) -> None:
    with started(tmp_path) as host:
        host.read(deadline_s=60)
        with pytest.raises(
            PacelineError, match=r"some_host has ended; the end of its log:\n(.*\n)*it could not be added"
        ):
            host.ask({"add": None}, deadline_s=60)


def test_program_that_says_nothing_is_not_waited_for(tmp_path: Path) -> None:
    silent = "import sys\nsys.stdin.read()"
    with started(tmp_path, silent) as host, pytest.raises(PacelineError, match="has said nothing for 0 s"):
        host.read(deadline_s=0.1)


def test_arms_differ_by_one_variable(tmp_path: Path) -> None:
    """A plain arm that inherits PACELINE from the shell would be compared with itself."""
    environ = {"HOME": "/root", "PACELINE": "auto", "PYTHONPATH": "own"}
    plain = host_environment(environ, tmp_path, kv_cache_gb=2)
    paceline = host_environment(environ, tmp_path, kv_cache_gb=2, speculation=Path("/x/speculation.toml"))
    assert "PACELINE" not in plain and paceline == plain | {"PACELINE": "/x/speculation.toml"}
    assert plain["PYTHONPATH"] == os.pathsep.join([str(tmp_path), str(ROOT), "own"]) and plain["HOME"] == "/root"
    own = host_environment({}, tmp_path, kv_cache_gb=2)["PYTHONPATH"]
    assert own == os.pathsep.join([str(tmp_path), str(ROOT)]), "an empty part is the cwd"


def write_wheel(directory: Path) -> str:
    """Make a wheel by hand; returns its checksum."""
    wheel = directory / "some_trl-1.0-py3-none-any.whl"
    info = "some_trl-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("some_trl.py", "x = 1\n")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: some-trl\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", f"some_trl.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


def test_environment_is_made_once_and_only_of_what_was_pinned(tmp_path: Path) -> None:
    said: list[str] = []
    context = Context(report=said.append, cache_root=tmp_path / "cache")
    requirements = tmp_path / "some.txt"

    def pin(checksum: str) -> None:
        options = f"--no-index\n--find-links {tmp_path}\n"
        requirements.write_text(f"{options}some-trl==1.0 --hash=sha256:{checksum}\n")

    checksum = write_wheel(tmp_path)
    pin("0" * 64)
    with pytest.raises(PacelineError, match=r"(?s)TRL cannot be installed.*HASHES"):
        trl_site(context, requirements)
    pin(checksum)
    site = trl_site(context, requirements)
    assert (site / "some_trl.py").read_text() == "x = 1\n"
    said.clear()
    assert trl_site(context, requirements) == site and said == []
    (site / "some_trl.py").write_text("x = 2\n")
    assert trl_site(context, requirements) == site and (site / "some_trl.py").read_text() == "x = 1\n"
