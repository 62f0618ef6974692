"""What this vLLM can do, asked of the vLLM that is installed rather than remembered.

Two facts of the CPU backend matter:

* A narrow bfloat16 model dies of an illegal instruction when its first forward pass has fewer than 8 tokens, unless AMX was
  initialised in that process. `initialise_amx` is harmless everywhere else.
* Under speculation, vLLM 0.32 and before take per-token temperature, top_k and top_p from uninitialised memory (vLLM issue
  55005): what is sampled at a temperature above 0 is wrong, while greedy output is right. `sampler_is_sound` asks the function at
  fault, and an engine refuses to speculate while the answer is no.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OLDEST = (0, 30)
NEWEST = (0, 32)


def check_version(version: str) -> None:
    """Refuse a vLLM that this release was not written against: its internals move with every minor release."""
    major, minor = version.split(".")[:2]
    if not OLDEST <= (int(major), int(minor)) <= NEWEST:
        raise ValueError(
            f"vllm: got {version}; must be {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]} because the weight wire and the "
            "worker extension use interfaces that vLLM changes between minor releases"
        )


def initialise_amx() -> bool:
    """Ask the kernel for AMX state where the CPU has it; True when AMX is usable in this process."""
    import torch

    if not torch.cpu._is_amx_tile_supported():
        return False
    return torch.cpu._init_amx()


def sampler_is_sound() -> bool:
    """Whether vLLM's rejection sampler gives every draft token the temperature of its own request."""
    import torch
    from vllm.platforms import current_platform
    from vllm.triton_utils.dispatcher import KernelOverride
    from vllm.v1.sample import rejection_sampler

    # The fault is in the CPU's replacement of a Triton kernel, which vLLM installs in its workers only.
    if current_platform.is_cpu() and not isinstance(rejection_sampler.expand_kernel, KernelOverride):
        current_platform.register_triton_kernel_overrides()
    device = current_platform.device_type
    temperature_B = torch.tensor([0.6, 1.3, 2.5], device=device)
    ends_B = torch.tensor([2, 5, 6], dtype=torch.int32, device=device)
    expected_T = torch.tensor([0.6, 0.6, 1.3, 1.3, 1.3, 2.5])
    # Memory left over from an earlier right answer would look right again, so the allocator's free block is dirtied first.
    torch.full((6,), -1.0, device=device)
    return torch.equal(rejection_sampler.expand_batch_to_tokens(temperature_B, ends_B, 6).cpu(), expected_T)


def refuse_unsound_speculation(speculative_config: Mapping[str, Any] | None) -> None:
    """Raise when speculation is asked for and this vLLM's sampler would draw from a wrong distribution."""
    if speculative_config is not None and not sampler_is_sound():
        raise ValueError(
            f"speculative_config: got {dict(speculative_config)}; must be None because this vLLM draws from a wrong distribution "
            "under speculation on the CPU (vLLM issue 55005); run without speculation, or on a GPU"
        )
