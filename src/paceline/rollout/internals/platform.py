"""vLLM's platform, and AMX on CPUs.

vLLM is asked for the device because it may be built for another platform than torch. Some engine settings differ on
CPUs. A narrow BF16 model dies of an illegal instruction when its first forward pass has fewer than 8 tokens, unless AMX
was initialized in that process; this is harmless elsewhere.

Relied upon:
  vllm/platforms/__init__.py    current_platform, which vLLM's plugins use too
  torch.cpu                     _is_amx_tile_supported and _init_amx, which vllm/v1/worker/cpu_worker.py calls for some
                                kernels

Goes when `EngineArgs` handles the limits of the CPU backend (chunked prefill of seeded requests, sleep mode), and
`test_no_process_outlives_its_owner` passes without AMX initialization.
"""

from __future__ import annotations


def on_cpu() -> bool:
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


def device_type() -> str:
    """Return the device of vLLM's tensors, as torch names it."""
    from vllm.platforms import current_platform

    return current_platform.device_type


def has_amx() -> bool:
    """Return whether the CPU has AMX, which vLLM's FP8 kernels for CPUs need."""
    import torch

    return torch.cpu._is_amx_tile_supported()


def initialize_amx() -> bool:
    """Request AMX state from the kernel; return whether AMX is usable in this process."""
    import torch

    return has_amx() and torch.cpu._init_amx()
