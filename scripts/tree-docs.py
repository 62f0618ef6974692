"""Writes the tree in docs/architecture.md from the first line of every module. Run it after adding, moving or
describing a file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "paceline"
PAGE = ROOT / "docs" / "architecture.md"
WIDTH = 32


def first_line(file: Path) -> str:
    words = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return " ".join(words.split("\n\n")[0].split()).rstrip(".:")


def lines(folder: Path, bars: str = "") -> Iterator[str]:
    """Files before folders, so that what everything else stands on comes first."""
    files = sorted(file for file in folder.glob("*.py") if file.name != "__init__.py")
    entries = [*files, *sorted(path.parent for path in folder.glob("*/__init__.py"))]
    for entry in entries:
        last = entry is entries[-1]
        name = entry.name + "/" * entry.is_dir()
        what = first_line(entry / "__init__.py" if entry.is_dir() else entry)
        line = bars + ("└── " if last else "├── ") + name
        yield f"{line:{WIDTH}} {what}"
        if entry.is_dir():
            yield from lines(entry, bars + ("    " if last else "│   "))


def page(text: str) -> str:
    """Return the page with the current tree."""
    tree = "\n".join(["src/paceline/", *lines(PACKAGE)])
    return re.sub(r"(?<=<!-- tree -->\n)```\n.*?```\n", lambda _: f"```\n{tree}\n```\n", text, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
