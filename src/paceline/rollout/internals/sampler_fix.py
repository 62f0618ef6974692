"""Fix vLLM's rejection sampler on CPUs, which samples from a wrong distribution.

Under speculation on the CPU, vLLM 0.32 and older read per-token temperature, top_k and top_p from uninitialized memory
(vLLM issue 55005): samples at a temperature above 0 are wrong, greedy output is right. `sampler_is_sound` tests the
faulty function; `mend_sampler` replaces it only if the test fails. vLLM 0.30 also crashes in its first verification,
because it installs its sampler's CPU kernels in the wrong place; `install_cpu_kernels` installs them in the right one.

Relied upon:
  vllm/v1/sample/rejection_sampler.py   expand_batch_to_tokens, a global that its callers look up; expand_kernel
  vllm/triton_utils/dispatcher.py       KernelOverride (0.31 and later)
  vllm/utils/cpu_triton_utils.py        *_kernel (before 0.31)
  vllm/platforms/interface.py           register_triton_kernel_overrides
  vllm/triton_utils/importing.py        HAS_TRITON: true on the CPU under Triton's interpreter only

Goes when no supported vLLM needs it: `test_probe_sees_the_fault_of_the_cpu_sampler` fails on the first sound version.
"""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def sampler_is_sound() -> bool:
    """Return whether the rejection sampler applies the temperature of the right request to each draft token."""
    import torch
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler

    install_cpu_kernels()
    device = current_platform.device_type
    temperature_B = torch.tensor([0.6, 1.3, 2.5], device=device)
    ends_B = torch.tensor([2, 5, 6], dtype=torch.int32, device=device)
    expected_T = torch.tensor([0.6, 0.6, 1.3, 1.3, 1.3, 2.5])
    # Overwrite the allocator's free block: stale memory of an earlier correct result would look correct.
    torch.full((6,), -1.0, device=device)
    try:
        expanded_T = rejection_sampler.expand_batch_to_tokens(temperature_B, ends_B, 6)
    except TypeError:  # vLLM before 0.31 calls a missing kernel
        return False
    return torch.equal(expanded_T.cpu(), expected_T)


def install_cpu_kernels() -> None:
    """Install vLLM's CPU kernels in place of its Triton kernels, as its worker does at start."""
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler

    if not current_platform.is_cpu():
        return
    try:
        from vllm.triton_utils.dispatcher import KernelOverride
    except ModuleNotFoundError:
        # vLLM 0.30 installs them beside the sampler's dispatchers and crashes at the first draft. Older versions have
        # no dispatchers.
        from vllm.utils import cpu_triton_utils

        for name in ("rejection_greedy_sample", "rejection_random_sample", "sample_recovered_tokens"):
            if hasattr(rejection_sampler, f"_{name}"):
                getattr(rejection_sampler, f"_{name}").kernel = getattr(cpu_triton_utils, f"{name}_kernel")
        return
    if isinstance(rejection_sampler.expand_kernel, KernelOverride):
        return
    # It reads every attribute of every module, and a deprecated one of llvmlite (a dependency of numba) raises.
    llvmlite = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "llvmlite"}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            current_platform.register_triton_kernel_overrides()
    finally:
        sys.modules.update(llvmlite)


def needs_mending() -> bool:
    """Return whether speculation would be wrong in this process."""
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    # Only CPU replacements of Triton kernels have the fault, and the test would initialize CUDA in processes that vLLM
    # forks.
    return current_platform.is_cpu() and not HAS_TRITON and not sampler_is_sound()


def mend_sampler() -> bool:
    """Replace the faulty function if necessary and return whether it was. Runs at the start of every vLLM process."""
    if not needs_mending():
        return False
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.expand_batch_to_tokens = _expand_batch_to_tokens
    if not sampler_is_sound():
        raise RuntimeError(
            "vLLM's rejection sampler no longer uses expand_batch_to_tokens as it did; speculation would be wrong"
        )
    return True


def _expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Expand [a, b] with ends [2, 5] to [a, a, b, b, b]."""
    lengths = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(lengths, output_size=num_tokens)
