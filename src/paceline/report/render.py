"""Render records as HTML pages, with the templates beside this file.

A page loads nothing from elsewhere and has no script. Every value is escaped; only the plots that matplotlib draws are
inserted as they are. Jinja2 is imported on first use: commands that write no page work without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.files import atomic_file

if TYPE_CHECKING:
    from jinja2 import Environment


def write_page(path: Path, template: str, **records: object) -> None:
    """Write a page atomically, so that browsers never load an incomplete page."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as partial:
        partial.write_text(render(template, **records), encoding="utf-8")


def render(template: str, **records: object) -> str:
    """Return the page that `templates/<template>` makes of the records; a record that it needs must be given."""
    return _environment().get_template(template).render(**records)


@cache
def _environment() -> Environment:
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError:
        raise ValueError("report: jinja2 is not installed; pip install 'paceline[report]'") from None
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["flat"] = flat
    return environment


def flat(tree: Mapping[str, object], prefix: str = "") -> list[tuple[str, str]]:
    """Return the leaves of nested mappings as rows of a table, under dotted names."""
    rows: list[tuple[str, str]] = []
    for key, value in tree.items():
        rows += flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(f"{prefix}{key}", str(value))]
    return rows
