"""Shut down AsyncLLM without error messages.

`AsyncLLM.shutdown` ends EngineCore before it cancels the output handler, which then reports a crash with a traceback in
every successful run (vLLM issue 48745). When Python exits, `__del__` calls `shutdown` again, in a module without
globals.

Relied upon: vllm/v1/engine/async_llm.py, AsyncLLM.output_handler, the task that waits for outputs; `__del__` calls
`shutdown`.

Goes when vLLM cancels its handler first and shuts down once.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


async def shut_down(llm: AsyncLLM, timeout_s: float) -> None:
    """Stop the engine's processes. EngineCore has `timeout_s` to stop by itself."""
    if llm.output_handler is not None:
        llm.output_handler.cancel()
        await asyncio.wait([llm.output_handler])
    try:
        await asyncio.to_thread(llm.shutdown, timeout_s)
    finally:
        llm.shutdown = lambda timeout=None: None
