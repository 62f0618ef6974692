"""The Ray cluster that a run uses."""

from __future__ import annotations

from paceline.config.base import Section


class ClusterConfig(Section):
    address: str | None = None
    """Address of a running Ray cluster (`auto` or host:port). None starts one on this machine that ends with the
    run."""
