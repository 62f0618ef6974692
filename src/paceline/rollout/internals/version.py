"""Which versions of vLLM this release was written against.

Relies on `vllm.__version__` only. Stays as long as anything else stands in this folder.
"""

from __future__ import annotations

OLDEST = (0, 30)
NEWEST = (0, 32)


def check_version(version: str) -> None:
    """Refuse a vLLM that this release was not written against: its internals move with every minor release."""
    major, minor = version.split(".")[:2]
    if not OLDEST <= (int(major), int(minor)) <= NEWEST:
        raise ValueError(
            f"vllm: got {version}; must be {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]} because the weight wire "
            "and the "
            "worker extension use interfaces that vLLM changes between minor releases"
        )
