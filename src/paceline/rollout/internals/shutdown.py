"""Ending AsyncLLM in order.

Relies on
    vllm/v1/engine/async_llm.py     AsyncLLM.output_handler, the task that waits for outputs; `__del__` calls `shutdown`

because `AsyncLLM.shutdown` ends the EngineCore before it cancels that task, which then reports the end as a crash:
"AsyncLLM output_handler failed" with a traceback, in every run that went well (vLLM issue 48745). And when Python ends,
`__del__` calls `shutdown` once more, in a module whose names are gone by then. Goes when vLLM cancels first and shuts
down once.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


async def shut_down(llm: AsyncLLM, timeout_s: float) -> None:
    """End the engine's processes; `timeout_s` is what the EngineCore gets to end by itself."""
    if llm.output_handler is not None:
        llm.output_handler.cancel()
        await asyncio.wait([llm.output_handler])
    try:
        await asyncio.to_thread(llm.shutdown, timeout_s)
    finally:
        llm.shutdown = lambda timeout=None: None
