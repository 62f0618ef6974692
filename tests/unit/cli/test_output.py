"""Whose lines reach the terminal: noise of libraries does not, a bug and a failure do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

NOISE = """
import os, subprocess, sys, warnings
from pathlib import Path
from paceline.cli.output import with_own_lines

def command(lines):
    print("own line", file=lines)
    print("noise of this process", file=sys.stderr)
    os.write(2, b"noise of C\\n")
    subprocess.run([sys.executable, "-c", "import sys; print('noise of a child', file=sys.stderr)"])
    {end}

sys.exit(with_own_lines(command, Path(sys.argv[1])))
"""


def run(directory: Path, end: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", NOISE.format(end=end), str(directory)]
    return subprocess.run(command, capture_output=True, text=True)  # noqa: PLW1510  the caller looks at the exit code


@pytest.mark.parametrize("code", [0, 1])
def test_what_libraries_print_is_not_seen_when_all_went_well(tmp_path: Path, code: int) -> None:
    done = run(tmp_path / "logs", f"return {code}")
    assert (done.returncode, done.stderr) == (code, "own line\n")
    assert list((tmp_path / "logs").iterdir()) == []


def test_what_libraries_printed_is_named_after_a_failure(tmp_path: Path) -> None:
    done = run(tmp_path / "logs", "return 2")
    (log,) = (tmp_path / "logs").iterdir()
    assert done.stderr == f"own line\noutput of libraries: {log}\n"
    assert log.read_text() == "noise of this process\nnoise of C\nnoise of a child\n"
    assert log.stat().st_mode & 0o077 == 0


def test_a_bug_is_seen(tmp_path: Path) -> None:
    done = run(tmp_path / "logs", "raise KeyError('ours')")
    assert done.returncode == 2 and "KeyError: 'ours'" in done.stderr


def test_a_caller_who_has_replaced_stderr_gets_the_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from paceline.cli import main

    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert "metrics.jsonl" in capsys.readouterr().err


def test_cache_that_cannot_be_written_says_what_to_set(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run(tmp_path / "file" / "logs", "return 0")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "file/logs: File exists; set PACELINE_CACHE" in done.stderr


def test_a_name_that_is_no_unicode_can_be_said(tmp_path: Path) -> None:
    """Arguments of a command may hold any bytes."""
    done = run(tmp_path / "logs", "print('got \\udcff', file=lines); return 2")
    assert done.returncode == 2 and "got \\udcff" in done.stderr and "Traceback" not in done.stderr
