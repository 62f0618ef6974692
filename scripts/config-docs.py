"""Write docs/config.md from src/paceline/config/ and the docstrings of its fields."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from paceline.config import Config, Section, sections_in

HEADER = """\
# Every setting

Generated from `src/paceline/config/` by `python scripts/config-docs.py`. A config is a TOML file; `section.key=value`
on the command line overrides a key. Unknown keys are refused. Defaults suit Qwen3-8B on 8 GPUs with 80 GB; the arena's
values are in `configs/arena.toml`.
"""


def sections(section: type[Section], path: str = "") -> Iterator[tuple[str, type[Section]]]:
    """Yield every section with its dotted name; the variants of a union share a name."""
    if path:
        yield path, section
    for name, field in section.model_fields.items():
        for variant in sections_in(field.annotation):
            yield from sections(variant, f"{path}.{name}" if path else name)


def page() -> str:
    parts = [HEADER]
    for path, section in sections(Config):
        fields = {name: field for name, field in section.model_fields.items() if not sections_in(field.annotation)}
        variant = _variant(section)
        if variant:
            del fields["kind"]
        parts.append(f"\n## {path}" + (f' (kind = "{variant}")' if variant else "") + "\n\n")
        parts.append("| key | default | values | meaning |\n|---|---|---|---|\n")
        parts += [
            f"| `{name}` | {_default(field)} | {_values(field)} | {_meaning(field)} |\n"
            for name, field in fields.items()
        ]
    return "".join(parts)


def _variant(section: type[Section]) -> str | None:
    """Return the kind of a union's variant; a `kind` with several values is an ordinary key."""
    kinds = get_args(section.model_fields["kind"].annotation) if "kind" in section.model_fields else ()
    return kinds[0] if len(kinds) == 1 else None


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    return "none" if field.default is None else f"`{json.dumps(field.default, default=str)}`"


def _values(field: FieldInfo) -> str:
    kind = re.sub(
        r"\b(pathlib\.(_local\.)?|typing\.)",
        "",
        field.annotation.__name__ if isinstance(field.annotation, type) else str(field.annotation),
    )
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    bounds = [
        f"{sign} {getattr(part, name):g}"
        for part in field.metadata
        for name, sign in signs.items()
        if hasattr(part, name)
    ]
    return f"`{' '.join((kind, ', '.join(bounds))).strip()}`".replace("|", "\\|").replace("'", '"')


def _meaning(field: FieldInfo) -> str:
    return " ".join((field.description or "").split())


if __name__ == "__main__":
    Path(__file__).resolve().parents[1].joinpath("docs", "config.md").write_text(page(), encoding="utf-8")
