"""The arena's policies, by name.

    tiny    0.4 M parameters: for tests
    small   3 M parameters: what RL trains in the demo and in the benches
    large   small, grown to 350 M parameters: the same function at a large model's cost

The first two come with the package (`paceline.assets`). A grown policy is made from them in seconds and cached in
`<cache root>/arena/<name>-<hash of its shape and its source>`, so another source never finds an older policy.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from paceline import assets
from paceline.arena.cache import build_once
from paceline.arena.growth import grow
from paceline.arena.shape import Shape
from paceline.context import Context
from paceline.files import CHECKSUM_FILE, atomic_directory, sha256_of, write_checksums


@dataclass(frozen=True, slots=True, kw_only=True)
class Grown:
    """A policy grown from one that comes with the package. Stored in bfloat16, the precision in which a model of that
    size is served."""

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
    """Return the directory of the policy of this name; a grown one is made first when it is missing or damaged."""
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
    """Return the cache's directory of a grown policy, or of its drafter of this kind."""
    grown = GROWN[name]
    source = assets.policy(grown.source) if drafter is None else assets.drafter(grown.source, drafter)
    parts = (json.dumps(asdict(grown), sort_keys=True).encode(), (source / CHECKSUM_FILE).read_bytes())
    label = name if drafter is None else f"{name}-{drafter}"
    return context.cache_root / "arena" / f"{label}-{sha256_of(parts)[:12]}"
