"""Call our scheduler from the engine's owner, through a utility method added to vLLM's EngineCore.

    VllmEngine ── call_utility_async("paceline_scheduler", method, value) ──▶ EngineCore ──▶ scheduler.method(value)

The scheduler runs in EngineCore's process, and `collective_rpc` ends in the workers. EngineCore looks up utility
methods on itself by name, so adding one replaces nothing. It answers them between two steps, on the thread that
schedules, so neither side needs a lock. Arguments and answers are plain data (msgpack).

Relied upon:
  vllm/v1/engine/core.py          EngineCore.scheduler; EngineCoreProc looks utility methods up with getattr and passes
                                  arguments by position, at most as many as the method's signature has
  vllm/v1/engine/core_client.py   call_utility_async (AsyncMPClient); AsyncLLM.engine_core

Goes when vLLM lets a caller set the draft length (`set_draft_length`) and read a scheduler's own statistics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core import EngineCore

NAME = "paceline_scheduler"
METHODS = frozenset({"counters", "take_timeline", "set_draft_limit"})
"""Callable methods of `scheduler.AdaptiveScheduler`."""


def install() -> None:
    """Add the method to EngineCore. The scheduler calls this on construction, in EngineCore's process."""
    from vllm.v1.engine.core import EngineCore

    setattr(EngineCore, NAME, _paceline_scheduler)


async def call(llm: AsyncLLM, method: str, *value: Any) -> Any:
    """Call one of METHODS on the scheduler of an engine."""
    assert method in METHODS, method
    return await cast("Any", llm.engine_core).call_utility_async(NAME, method, *value)


def _paceline_scheduler(self: EngineCore, method: str, *value: Any) -> Any:
    if method not in METHODS:
        raise ValueError(f"{NAME}: got {method!r}; must be one of {sorted(METHODS)}")
    return getattr(self.scheduler, method)(*value)
