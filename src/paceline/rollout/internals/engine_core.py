"""Observe a host's calls to its workers in EngineCore, and answer ours.

    sleep, wake_up, collective_rpc(method) ──▶ EngineCore ──▶ executor ──▶ workers
                                                   │
                       survival.before, after ◀────┤      observe changes of weights (drafter_survival.py)
            engine_call(name), worker_call(name) ◀─┘      resolve our method names (rollout/calls.py)

Hosts use `worker_extension_cls` themselves and call workers in many ways, but always through EngineCore. Its three
methods are wrapped when our scheduler is built in its process; with other schedulers the wrappers do nothing. Our names
are replaced by functions, which the executor sends to the workers. So they work from `LLM.collective_rpc` and from
`POST /collective_rpc`.

Relied upon:
  vllm/v1/engine/core.py        EngineCore: sleep(level), wake_up(tags), collective_rpc(method, timeout, args, kwargs),
                                scheduler; model_executor.collective_rpc, which takes functions too
  vllm/entrypoints/serve/dev/rpc/api_router.py    passes on method and arguments of a request unchanged

Goes when a plugin can add worker methods beside the host's extension, and with `drafter_survival.py`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from paceline.rollout.internals.drafter_survival import DrafterSurvival, meaning_of

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

_MARK = "_paceline_watched"
WATCHED = ("sleep", "wake_up", "collective_rpc")


def install() -> None:
    """Wrap EngineCore's methods, once per process."""
    from vllm.v1.engine.core import EngineCore

    for name in WATCHED:
        method = getattr(EngineCore, name)
        if not hasattr(method, _MARK):
            setattr(EngineCore, name, watched(name, method))


def watched(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap one of EngineCore's methods."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    def call(self: EngineCore, *args: Any, **kwargs: Any) -> Any:
        # EngineCore calls its workers before it has a scheduler.
        scheduler: Any = getattr(self, "scheduler", None)
        if not hasattr(scheduler, "worker_call"):
            return method(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs)
        given = bound.arguments
        meaning = None
        if name == "collective_rpc":
            meaning = meaning_of(given["method"], given.get("args", ()), given.get("kwargs"))
            if (answer := scheduler.engine_call(given["method"])) is not None:
                return [answer()]
            given["method"] = scheduler.worker_call(given["method"]) or given["method"]
        else:
            meaning = meaning_of(name, (given.get("level", given.get("tags")),), None)
        survival: DrafterSurvival | None = scheduler.survival
        if survival is None:
            return method(*bound.args, **bound.kwargs)
        rpc: Any = self.model_executor.collective_rpc
        survival.before(meaning, rpc)
        answered = method(*bound.args, **bound.kwargs)
        survival.after(meaning, rpc)
        return answered

    setattr(call, _MARK, True)
    return call
