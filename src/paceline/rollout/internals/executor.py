"""Run the worker inside EngineCore on CPUs, as vLLM does on one GPU.

vLLM's CPU platform uses the backend "mp", which costs as much as speculation gains: both processes poll shared memory
for messages, up to a second after the last one, and compete for the cores of engine and learner. vLLM chooses "mp" to
pin cores before PyTorch's threads start; here the owner sets the environment first.

Relied upon:
  vllm/v1/executor/uniproc_executor.py    UniProcExecutor, `_init_executor`
  vllm/envs.py                            VLLM_CPU_OMP_THREADS_BIND, which `set_environment` sets
  vllm/platforms/cpu.py                   replaces the backend "uni" by "mp", and accepts classes

Goes when vLLM's CPU platform accepts "uni", or its processes stop polling when idle.
"""

from __future__ import annotations

import os

from vllm import envs
from vllm.v1.executor.uniproc_executor import UniProcExecutor


class InProcessExecutor(UniProcExecutor):
    """Passed to vLLM as `distributed_executor_backend`."""

    def _init_executor(self) -> None:
        cpus = envs.VLLM_CPU_OMP_THREADS_BIND
        if cpus != "nobind":
            # PyTorch's threads inherit it.
            os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})
        super()._init_executor()
