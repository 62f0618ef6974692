"""The worker inside EngineCore on the CPU too, where vLLM would give it a process of its own.

    owner (VllmEngine) ── EngineCore with its worker        as vLLM does it on one GPU

Relies on
    vllm/v1/executor/uniproc_executor.py    UniProcExecutor, `_init_executor`
    vllm/envs.py                            VLLM_CPU_OMP_THREADS_BIND, which `set_environment` sets
    vllm/platforms/cpu.py                   replaces the backend "uni" by "mp", and leaves classes alone

because "mp" costs what speculation is to gain. Both processes watch shared memory for each other's messages without a
pause, and go on for a second after the last one (`SpinCondition` in shm_broadcast.py): in a batch they take turns on
the engine's core, and after it the learner waits for cores that two idle engines keep busy. vLLM chooses "mp" because
cores must be chosen before PyTorch's threads start; here they are, because the owner sets the environment first. It can
go when vLLM's CPU platform takes "uni", or its processes rest at once.
"""

from __future__ import annotations

import os

from vllm import envs
from vllm.v1.executor.uniproc_executor import UniProcExecutor


class InProcessExecutor(UniProcExecutor):
    """Given to vLLM as `distributed_executor_backend`."""

    def _init_executor(self) -> None:
        cpus = envs.VLLM_CPU_OMP_THREADS_BIND
        if cpus != "nobind":
            # Of this thread, and of those that PyTorch starts from it.
            os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})
        super()._init_executor()
