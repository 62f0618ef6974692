"""Contexts for jobs that tests start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from paceline.context import Context

NOWHERE = Path("/nonexistent")


def make_context(cache_root: Path = NOWHERE, report: Callable[[str], None] = lambda line: None) -> Context:
    """Return a context that reports nowhere and, unless told where, cannot cache."""
    return Context(report=report, cache_root=cache_root)
