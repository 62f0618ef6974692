"""Calls answered by every engine with our scheduler, in any host, by name through vLLM's `collective_rpc`.

    llm.collective_rpc(PUSH, args=(push.to_dict(),))                         in the engine's process
    POST /collective_rpc {"method": "paceline_push", "args": [push]}         vLLM's server, VLLM_SERVER_DEV_MODE=1
    POST /paceline/calls {"method": "paceline_push", "args": [push]}         the same without it (endpoint.py)

They need no `worker_extension_cls`, which hosts use themselves, and no weight-transfer backend
(`internals/engine_core.py`). Arguments and answers are plain JSON data. Callers import this module too, so it must not
import vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

PUSH = "paceline_push"
"""Takes a `weights.message.Push` of policy or drafter; answers with a `PushReport`."""
DRAFTER = "paceline_drafter"
"""Answers with a `ServedDrafter`."""
COUNTERS = "paceline_counters"
"""Answers once for all workers with the scheduler's totals since the start and `draft/version`, by metric key."""
MONITOR = "paceline_monitor"
"""Answers with evidence and counts of the losslessness monitor by metric key, from each worker."""
NAMES = (PUSH, DRAFTER, COUNTERS, MONITOR)
ENDPOINT = "/paceline/calls"
"""Path of our endpoint."""
NOT_THERE = (
    "the engine does not know Paceline's calls: it must have Paceline's scheduler, which PACELINE=speculation.toml "
    "sets (docs/hosts.md)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedDrafter:
    """Drafter of an engine, as reported by a worker."""

    problem: str | None
    """Why it cannot take new weights, None if it can."""
    checkpoint: str = ""
    """Its checkpoint directory."""
    kind: str = ""
    """vLLM's method name, such as eagle3."""
    draft_length: int = 0
    """Maximum draft length."""


def push(worker: Any, message: Mapping[str, Any]) -> dict[str, Any]:
    """Check a push and load it. Runs in the worker."""
    from paceline.rollout.receiver import receive_push
    from paceline.weights.message import Push

    return receive_push(_unwrapped(worker), Push.from_dict(message)).to_dict()


def refuse_asleep(worker: Any, message: Mapping[str, Any]) -> dict[str, Any]:
    """Refuse a push to a sleeping engine, which has no memory to write. Runs in the worker."""
    from paceline.weights.message import PushReport

    return PushReport(version=message["version"], refused="the engine is asleep: wake its weights up first").to_dict()


def describe_drafter(worker: Any) -> dict[str, Any]:
    """Describe the drafter. Runs in the worker."""
    from paceline.rollout.receiver import drafter_problem
    from paceline.weights.check import inventory

    worker = _unwrapped(worker)
    speculation = worker.speculative_config
    if speculation is None or speculation.draft_model_config is None:
        return asdict(ServedDrafter(problem="this engine runs without a learned drafter"))
    checkpoint = speculation.draft_model_config.model
    return asdict(
        ServedDrafter(
            problem=drafter_problem(worker, inventory(checkpoint)),
            checkpoint=checkpoint,
            kind=speculation.method,
            draft_length=speculation.num_speculative_tokens,
        )
    )


def monitor_figures(worker: Any) -> dict[str, float]:
    """Return the figures of the losslessness monitor. Runs in the worker."""
    from paceline.rollout.internals.model_runner import runner_version
    from paceline.rollout.internals.verification_monitor import figures, start

    start(runner_version(_unwrapped(worker)))  # where no plugin has: in a host's own process, in Ray's
    return figures()


AWAKE: Mapping[str, Callable[..., Any]] = {PUSH: push, DRAFTER: describe_drafter, MONITOR: monitor_figures}
"""Functions of the names in the workers."""
ASLEEP: Mapping[str, Callable[..., Any]] = {PUSH: refuse_asleep, DRAFTER: describe_drafter, MONITOR: monitor_figures}


def _unwrapped(worker: Any) -> Any:
    return getattr(worker, "worker", worker)  # vLLM passes the worker's wrapper
