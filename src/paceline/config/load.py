"""Load a config from a TOML file and `a.b=value` overrides, and explain errors."""

from __future__ import annotations

import difflib
import json
import tomllib
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from paceline.config.base import Section
from paceline.config.root import Config


def load_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file, or the config.json of a run, and apply `a.b=value` overrides."""
    tree: dict[str, Any] = {}
    if path is not None:
        file = Path(path)
        if not file.is_file():
            raise ValueError(f"config: got {file}; must be a TOML file (configs/arena.toml is a start)")
        name, read = ("JSON", json.loads) if file.suffix == ".json" else ("TOML", tomllib.loads)
        try:
            tree = read(file.read_text(encoding="utf-8-sig"))
        except (ValueError, RecursionError) as error:  # syntax, encoding, too many digits, too deep nesting
            raise ValueError(f"config: {file} is not {name}: {error}") from None
    _apply(tree, overrides)
    tree.setdefault("policy", {})  # so that the error names the key policy.model, not the section
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ValueError("\n".join(_explain(detail) for detail in error.errors())) from None


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Read `a.b=value` words as a nested dict."""
    tree: dict[str, Any] = {}
    _apply(tree, overrides)
    return tree


def sections_in(annotation: Any) -> list[type[Section]]:
    """Return the sections that a field of this type can hold: several for a union of kinds, none for a plain value."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    if get_origin(annotation) in (Union, types.UnionType):
        return [section for argument in get_args(annotation) for section in sections_in(argument)]
    return []


def fields_of(section: type[Section], prefix: str = "") -> Iterator[tuple[str, list[type[Section]]]]:
    """Yield the dotted key of every field under a section, with the sections that it can hold."""
    for name, info in section.model_fields.items():
        inner = sections_in(info.annotation)
        yield prefix + name, inner
        for variant in inner:
            yield from fields_of(variant, f"{prefix}{name}.")


def adjustable_keys() -> list[str]:
    """Return the dotted keys of all settings that may differ after a resume."""
    sections = [("", Config), *((f"{key}.", section) for key, inner in fields_of(Config) for section in inner)]
    return sorted({prefix + name for prefix, section in sections for name in section.adjustable()})


def _explain(detail: ErrorDetails) -> str:
    """Describe an error by the key as the user writes it, the value and the requirement."""
    if detail["type"] == "value_error":  # our own validators name their key
        return str(detail["ctx"]["error"])  # pyright: ignore[reportTypedDictNotRequiredAccess]
    kinds = {key: [_kind(variant) for variant in inner] for key, inner in fields_of(Config) if len(inner) > 1}
    parts: list[str] = []
    *outer, last = [str(part) for part in detail["loc"]]
    for part in outer:
        # pydantic adds the kind to the path: data.jsonl.path is the user's data.path
        if part not in kinds.get(".".join(parts), ()):
            parts.append(part)
    key = ".".join([*parts, last])
    match detail["type"]:
        case "missing" if key == "policy.model":
            return (
                f"{key}: is missing; add this line at the top of the TOML file, or policy.model=Qwen/Qwen3-8B to the "
                'command:\npolicy.model = "Qwen/Qwen3-8B"'
            )
        case "missing":
            return f"{key}: is missing; must be set"
        case "union_tag_not_found":
            return f"{key}.kind: is missing; must be one of {', '.join(kinds[key])}"
        case "extra_forbidden":
            near = difflib.get_close_matches(key, [known for known, _ in fields_of(Config)], n=1)
            return f"{key}: unknown key" + (f"; did you mean {near[0]}?" if near else "")
        case _:
            return f"{key}: got {detail['input']!r}; {detail['msg'][:1].lower()}{detail['msg'][1:]}"


def _kind(variant: type[Section]) -> str:
    return variant.model_fields["kind"].default


def _apply(tree: dict[str, Any], overrides: Sequence[str]) -> None:
    """Apply overrides in order, but kinds first, because a kind drops the keys of the file that it does not have."""
    for override in sorted(overrides, key=lambda override: not override.partition("=")[0].rstrip().endswith(".kind")):
        _set(tree, override)


def _set(tree: dict[str, Any], override: str) -> None:
    """Set one dotted key to a TOML value, or to the bare text if it is not TOML."""
    key, equals, text = (part.strip() for part in override.partition("="))
    if not equals or not key:
        raise ValueError(f"override: got {override!r}; must be a.b=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        value = text
    *path, leaf = key.split(".")
    for part in path:
        if tree.get(part) is None:  # absent, or null in a run's config.json
            tree[part] = {}
        tree = tree[part]
        if not isinstance(tree, dict):
            raise ValueError(f"override: {key!r} goes through {part!r}, which is a value")
    variants = dict(fields_of(Config)).get(".".join(path), []) if leaf == "kind" else []
    if len(variants) > 1:
        known = {name for variant in variants if _kind(variant) == value for name in variant.model_fields}
        for name in tree.keys() - known:
            del tree[name]
    tree[leaf] = value
