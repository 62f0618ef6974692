"""AMX is initialised before vLLM's first forward pass on a CPU that has it.

A narrow bfloat16 model dies of an illegal instruction when its first forward pass has fewer than 8 tokens, unless AMX
was initialised in that process. Harmless everywhere else.

Relied upon: `torch.cpu._is_amx_tile_supported` and `torch.cpu._init_amx`, which vLLM's CPU worker calls too
(vllm/v1/worker/cpu_worker.py), but only for kernels of its own. Goes when `test_no_process_outlives_its_owner` passes
without it.
"""

from __future__ import annotations


def has_amx() -> bool:
    """Whether the CPU has AMX, which vLLM's FP8 kernels for CPUs need."""
    import torch

    return torch.cpu._is_amx_tile_supported()


def initialise_amx() -> bool:
    """Ask the kernel for AMX state where the CPU has it; True when AMX is usable in this process."""
    import torch

    return has_amx() and torch.cpu._init_amx()
