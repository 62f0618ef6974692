"""Checkpoints that are part of the package, for `paceline doctor`, the demo, benches and tests.

    policy("small")              a policy of the arena with 3 M parameters; "tiny" has 0.4 M
    drafter("small", "eagle3")   a drafter for it: eagle3 or dflash

Weights are in bfloat16. `python -m scripts.rebuild_arena` rebuilds everything.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from paceline.files import verify_checksums

ROOT = Path(__file__).parent
POLICIES = ("tiny", "small")
DRAFTERS = ("eagle3", "dflash")


def policy(name: str) -> Path:
    """Return a policy's directory after verifying its checksums."""
    return _verified(ROOT / name)


def drafter(policy_name: str, kind: str) -> Path:
    """Return the directory of a policy's drafter after verifying its checksums."""
    return _verified(ROOT / f"{policy_name}-{kind}")


@cache
def _verified(directory: Path) -> Path:
    if not verify_checksums(directory):
        raise ValueError(
            f"{directory} has no checksums; install the package again, or make it by `python -m scripts.rebuild_arena`"
        )
    return directory
