"""The calls that a host makes to its workers: they come through EngineCore, where they are seen and ours are answered.

    sleep, wake_up, collective_rpc(method) ──▶ EngineCore ──▶ executor ──▶ workers
                                                   │
                       survival.before, after ◀────┤      told what is done to weights (drafter_survival.py)
            engine_call(name), worker_call(name) ◀─┘      what a method name of ours stands for (rollout/calls.py)

Hosts use `worker_extension_cls` themselves, and their calls reach the workers in many ways. What they have in common is
EngineCore. Its three methods are wrapped when our scheduler is built in its process, and pass everything on for other
schedulers. A name of ours is replaced by a function, which the executor carries to the workers as vLLM's
`collective_rpc` carries functions; so it works from `LLM.collective_rpc` and from `POST /collective_rpc`.

Relied upon:
  vllm/v1/engine/core.py        EngineCore: sleep(level), wake_up(tags), collective_rpc(method, timeout, args, kwargs),
                                scheduler; model_executor.collective_rpc, which takes functions too
  vllm/entrypoints/serve/dev/rpc/api_router.py    passes method and arguments of a request on as they are

Goes when a plugin can add worker methods beside the host's extension, and `drafter_survival.py` has gone.
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
    """Wrap EngineCore's methods, once in a process."""
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
        # None while EngineCore is being built: it calls its workers before it has a scheduler.
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
