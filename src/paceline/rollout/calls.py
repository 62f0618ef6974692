"""Calls of ours that every engine with our scheduler answers, in any host: by name, through vLLM's `collective_rpc`.

    llm.collective_rpc(PUSH, args=(push.to_dict(),))                         in the process that has the engine
    POST /collective_rpc {"method": "paceline_push", "args": [push]}         vLLM's server, VLLM_SERVER_DEV_MODE=1
    POST /paceline/calls {"method": "paceline_push", "args": [push]}         the same without it (endpoint.py)

They need no `worker_extension_cls`, which hosts use themselves, and no weight-transfer backend
(`internals/engine_core.py`). Arguments and answers are plain data: JSON carries them. Importing this module takes
nothing of vLLM: whoever calls imports it too.
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
"""Answers with the scheduler's totals since the start and `draft/version`, by metric key; one answer for all
workers."""
NAMES = (PUSH, DRAFTER, COUNTERS)
ENDPOINT = "/paceline/calls"
"""Where a server with our endpoint takes them."""
NOT_THERE = (
    "the engine does not know calls of Paceline: its scheduler must be Paceline's, which PACELINE=speculation.toml "
    "sees to (docs/hosts.md)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedDrafter:
    """The drafter of an engine, as one of its workers knows it."""

    problem: str | None
    """Why it cannot take new weights; None if it can."""
    checkpoint: str = ""
    """Where the engine has loaded it from."""
    kind: str = ""
    """vLLM's name for it, such as eagle3."""
    draft_length: int = 0
    """Most tokens that it drafts."""


def push(worker: Any, message: Mapping[str, Any]) -> dict[str, Any]:
    """Check a push and load it. Runs in the worker."""
    from paceline.rollout.receiver import receive_push
    from paceline.weights.message import Push

    return receive_push(_unwrapped(worker), Push.from_dict(message)).to_dict()


def refuse_asleep(worker: Any, message: Mapping[str, Any]) -> dict[str, Any]:
    """Refuse a push without touching memory, which is not there in sleep. Runs in the worker."""
    from paceline.weights.message import PushReport

    return PushReport(version=message["version"], refused="the engine is asleep: wake its weights up first").to_dict()


def describe_drafter(worker: Any) -> dict[str, Any]:
    """Tell which drafter this is. Runs in the worker."""
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


AWAKE: Mapping[str, Callable[..., Any]] = {PUSH: push, DRAFTER: describe_drafter}
"""What a name stands for in the workers."""
ASLEEP: Mapping[str, Callable[..., Any]] = {PUSH: refuse_asleep, DRAFTER: describe_drafter}


def _unwrapped(worker: Any) -> Any:
    return getattr(worker, "worker", worker)  # vLLM passes the wrapper that it keeps the worker in
