"""Which versions of vLLM this release was written against.

Relies on `vllm.__version__` only. Stays as long as anything else stands in this folder.
"""

from __future__ import annotations

import re

OLDEST = (0, 30)
OLDEST_HOST = (0, 24)
"""Oldest vLLM of other hosts: scheduler and PACELINE need less of vLLM than our own engines (docs/support.md says which
versions have run)."""
NEWEST = (0, 32)
KNOWN = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
KNOWN_HOSTS = f"{OLDEST_HOST[0]}.{OLDEST_HOST[1]} to {NEWEST[0]}.{NEWEST[1]}"


def is_known(version: str, oldest: tuple[int, int] = OLDEST) -> bool:
    """Whether this release was written against a vLLM of this version; one that is no number is not known."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return numbers is not None and oldest <= (int(numbers[1]), int(numbers[2])) <= NEWEST


def check_version(version: str) -> None:
    """Refuse a vLLM that this release was not written against: its internals move with every minor release."""
    if not is_known(version):
        raise ValueError(
            f"vllm: got {version}; must be {KNOWN} because the weight wire and the worker extension use interfaces "
            "that vLLM changes between minor releases"
        )
