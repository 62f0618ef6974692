"""scripts/check-hooks.py: it sees a hook that is gone, in sources that it does not import."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

SCRIPT = runpy.run_path(str(Path(__file__).resolve().parents[3] / "scripts" / "check-hooks.py"))


def write_package(directory: Path, *, without: str = "") -> Path:
    """Write classes with all members but one. Importing any of the files would fail."""
    for name, classes in SCRIPT["HOOKS"].items():
        lines = ["import nothing_of_this_name"]
        for owner, members in classes.items():
            kept = [member for member in members if member != without]
            methods = [member.replace("(", "(this, ") for member in kept if "(" in member]
            lines += [f"class {owner}:", "    pass"]
            lines += [f"    {member}: int" for member in kept if "(" not in member]
            lines += [f"    def {method}: ..." for method in methods]
        file = directory / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(lines))
    return directory


def test_whole_package_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert SCRIPT["main"]([str(write_package(tmp_path))]) == 0
    assert "all hooks are there" in capsys.readouterr().out


@pytest.mark.parametrize("gone", ["schedule(throttle_prefills)", "dynamic_sd_lookup", "num_spec_tokens_to_schedule"])
def test_missing_hook_is_named(gone: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A method that lost its parameter is a hook that is gone as well."""
    assert SCRIPT["main"]([str(write_package(tmp_path, without=gone))]) == 1
    assert f".{gone}" in capsys.readouterr().out


def test_missing_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_package(tmp_path)
    (tmp_path / "v1/outputs.py").unlink()
    assert SCRIPT["main"]([str(tmp_path)]) == 1
    assert "v1/outputs.py: DraftTokenIds" in capsys.readouterr().out
