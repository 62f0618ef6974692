"""vLLM's processes: which of them the current one is.

    owner (VllmEngine) ── EngineCore ── worker        the worker may also live inside EngineCore (one GPU)

Relies on the names that vLLM gives its processes
    vllm/v1/engine/utils.py                     EngineCore, EngineCore_DP0, ...
    vllm/v1/executor/multiproc_executor.py      VllmWorker-0, ...

because its processes do not end with the process that started them. It can go when they do.
"""

from __future__ import annotations

import multiprocessing
import os

ENGINE_CORE = "EngineCore"
WORKER = "VllmWorker"


def inside_vllm() -> bool:
    """Whether this is one of vLLM's own processes."""
    return multiprocessing.current_process().name.startswith((ENGINE_CORE, WORKER))


def engine_core_pid() -> int:
    """Process id of the EngineCore that this worker serves."""
    inside = multiprocessing.current_process().name.startswith(ENGINE_CORE)
    return os.getpid() if inside else os.getppid()
