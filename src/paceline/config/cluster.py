"""The Ray cluster that a run uses."""

from __future__ import annotations

from typing import Literal

from paceline.config.base import Adjustable, Section


class ClusterConfig(Section):
    address: Adjustable[str | None] = None
    """Address of a running Ray cluster (`auto` or host:port). None starts one on this machine that ends with the
    run."""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """What engines and learner compute on. `auto` is GPUs if any node of the cluster has one. `gpu` refuses to start
    without them; `cpu` leaves them alone, for which engines need vLLM's CPU build."""
