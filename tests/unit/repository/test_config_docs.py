"""docs/config.md says what the config is now."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from paceline.config import load_config

ROOT = Path(__file__).resolve().parents[3]


def test_config_page_is_up_to_date() -> None:
    page = runpy.run_path(str(ROOT / "scripts" / "config-docs.py"))["page"]()
    written = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert written == page, "run: python scripts/config-docs.py"


@pytest.mark.parametrize(
    "file", [*sorted(ROOT.glob("configs/*.toml")), *sorted(ROOT.glob("examples/*/config.toml"))], ids=str
)
def test_shipped_config_is_accepted(file: Path) -> None:
    load_config(file)
