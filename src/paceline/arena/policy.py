"""The arena's policies.

    tiny    0.4 M parameters: for tests
    small   3 M parameters: for RL in the demo and in benchmarks
    large   small, grown to 350 M parameters: the same function at a large model's cost

The first two are included in the package (`paceline.assets`). A grown policy is built in seconds and cached in
`<cache root>/arena/<name>-<hash of its shape and its source>`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from paceline import assets
from paceline.arena.growth import Shape, grow
from paceline.context import Context
from paceline.files import (
    CHECKSUM_FILE,
    ChecksumError,
    atomic_directory,
    lock,
    remove_partials,
    sha256_of,
    verify_checksums,
    write_checksums,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grown:
    """A policy grown from an included one, stored in bfloat16 like models of that size."""

    source: str
    shape: Shape


GROWN = {
    "large": Grown(
        source="small",
        shape=Shape(hidden_size=1024, num_layers=28, intermediate_size=3072, num_heads=16, num_kv_heads=8),
    )
}
NAMES = (*assets.POLICIES, *GROWN)


def find(name: str, context: Context) -> Path:
    """Return the directory of a policy. Build a grown one if it is missing or damaged."""
    if name in assets.POLICIES:
        return assets.policy(name)
    if name not in GROWN:
        raise ValueError(
            f"policy.model: got arena:{name}; must be one of " + ", ".join(f"arena:{known}" for known in NAMES)
        )
    grown = GROWN[name]
    source = assets.policy(grown.source)

    def write(directory: Path) -> None:
        context.progress(f"arena:{name}: growing arena:{grown.source}")
        with atomic_directory(directory) as partial:
            grow(source, partial, grown.shape, dtype=torch.bfloat16)
            write_checksums(partial)

    return build_once(cached(name, context), write, name=f"arena:{name}", context=context)


def cached(name: str, context: Context, *, drafter: str | None = None) -> Path:
    """Return the cache directory of a grown policy, or of its drafter of this kind."""
    grown = GROWN[name]
    source = assets.policy(grown.source) if drafter is None else assets.drafter(grown.source, drafter)
    parts = (json.dumps(asdict(grown), sort_keys=True).encode(), (source / CHECKSUM_FILE).read_bytes())
    label = name if drafter is None else f"{name}-{drafter}"
    return context.cache_root / "arena" / f"{label}-{sha256_of(parts)[:12]}"


def build_once(directory: Path, write: Callable[[Path], None], *, name: str, context: Context) -> Path:
    """Return `directory`, after `write` has built it atomically and with checksums if it is missing or damaged."""
    if is_whole(directory):
        return directory
    waiting = partial(context.progress, f"{name}: another process is building it")
    with lock(directory.with_name(directory.name + ".lock"), on_wait=waiting):
        if is_whole(directory):  # built by another process meanwhile
            return directory
        remove_partials(directory.parent, directory.name)  # of a killed build
        if directory.exists():
            context.progress(f"{name}: {directory} is damaged; building it again")
            shutil.rmtree(directory)
        write(directory)
    return directory


def is_whole(directory: Path) -> bool:
    """Return whether the directory holds an intact build."""
    try:
        return verify_checksums(directory)
    except ChecksumError:
        return False
