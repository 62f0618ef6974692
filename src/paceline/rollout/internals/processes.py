"""Identify vLLM's processes by name: they do not end with the process that started them.

    owner (VllmEngine) ── EngineCore ── worker        the worker may also run inside EngineCore (one GPU)

Relied upon:
  vllm/v1/engine/utils.py                   names EngineCore, EngineCore_DP0, ...
  vllm/v1/executor/multiproc_executor.py    names VllmWorker-0, ...

Goes when vLLM's processes end with their parent.
"""

from __future__ import annotations

import multiprocessing
import os

ENGINE_CORE = "EngineCore"
WORKER = "VllmWorker"


def inside_vllm() -> bool:
    """Return whether this is one of vLLM's processes."""
    return multiprocessing.current_process().name.startswith((ENGINE_CORE, WORKER))


def engine_core_pid() -> int:
    """Return the process id of this worker's EngineCore."""
    inside = multiprocessing.current_process().name.startswith(ENGINE_CORE)
    return os.getpid() if inside else os.getppid()
