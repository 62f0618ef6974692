"""Supported versions of vLLM.

Relied upon: `vllm.__version__`. Goes with the last other file of this folder.
"""

from __future__ import annotations

import re

OLDEST = (0, 30)
OLDEST_HOST = (0, 24)
"""Oldest vLLM of other hosts: scheduler and PACELINE use fewer interfaces than our engines (docs/support.md has the
tested versions)."""
NEWEST = (0, 32)
KNOWN = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
KNOWN_HOSTS = f"{OLDEST_HOST[0]}.{OLDEST_HOST[1]} to {NEWEST[0]}.{NEWEST[1]}"


def is_known(version: str, oldest: tuple[int, int] = OLDEST) -> bool:
    """Return whether this version of vLLM is supported; versions without a number are not."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return numbers is not None and oldest <= (int(numbers[1]), int(numbers[2])) <= NEWEST


def check_version(version: str) -> None:
    """Refuse an unsupported vLLM: its internals change with every minor release."""
    if not is_known(version):
        raise ValueError(
            f"vllm: got {version}; must be {KNOWN} because the weight wire and the worker extension use interfaces "
            "that vLLM changes between minor releases"
        )
