"""Commands in the documents: `paceline` or `python -m benchmarks` accepts each, and a test or a record runs it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import __main__ as benchmarks
from paceline import cli
from paceline.config import load_config

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md")), *sorted((ROOT / "examples").glob("*/README.md"))]
RUN_BY = {
    "train": "e2e/test_cluster.py",
    "report": "unit/report/test_drafter_report.py",
    "replay": "e2e/test_resume.py",
    "plan": "unit/cli/test_cli.py",
    "doctor": "engine/test_doctor.py",
    "demo": "engine/test_commands.py",
    "tune": "engine/test_commands.py",
    "draft train": "engine/test_commands.py",
    "certify": "engine/test_commands.py",
    "certify logp": "engine/test_commands.py",
    "export drafter": "unit/drafters/test_export.py",
    "explain": "unit/rollout/test_hosts.py",
    "sidecar": "engine/test_sidecar.py",
}
"""The test that runs a command as users do. A bench takes too long for that: its recorded result stands for it."""
BENCH = ["python", "-m", "benchmarks"]


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of every command of ours in a page's shell blocks; a bench's begin with `BENCH`."""
    for block in re.findall(r"```(?:bash|sh)\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["paceline"]:
                yield words[1:]
            elif words[: len(BENCH)] == BENCH:
                yield words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_a_page_are_taken(page: Path) -> None:
    """Options, settings and files that are not there would fail a reader who pastes the line."""
    for words in commands(page.read_text(encoding="utf-8")):
        if words[: len(BENCH)] == BENCH:
            name, *rest = words[len(BENCH) :]
            benchmarks.parser().parse_args([name, *rest])
            assert list((ROOT / "benchmarks" / "results").glob(f"{name}*.json")), f"{words}: not recorded"
        else:
            cli.parse(words)
            name = " ".join(words[:2])
            test = (ROOT / "tests" / RUN_BY.get(name, RUN_BY.get(words[0], "nowhere"))).read_text(encoding="utf-8")
            assert f'"{words[0]}"' in test or f"run_{words[0]}(" in test, f"{words}: no test runs it"
        settings = [word for word in words if re.match(r"[a-z_]+(\.[a-z_0-9]+)+=", word)]
        file = next((ROOT / word for word in words if word.startswith(("configs/", "examples/"))), None)
        load_config(file, settings if file else ["policy.model=any", *settings])


def test_a_page_has_commands() -> None:
    """Where blocks are not found, nothing is tested."""
    assert len(list(commands((ROOT / "README.md").read_text(encoding="utf-8")))) >= 6
