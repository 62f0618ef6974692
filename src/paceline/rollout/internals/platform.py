"""Whether vLLM runs on the CPU, and where its tensors live: asked of vLLM itself, which may be built for another
platform than torch.

Relies on `vllm/platforms/__init__.py` (`current_platform`), which vLLM's plugins use too. It can go when `EngineArgs`
chooses by itself what the CPU backend cannot do: chunked prefill of seeded requests, sleep mode.
"""

from __future__ import annotations


def on_cpu() -> bool:
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


def device_type() -> str:
    """Where vLLM's tensors live, as torch names it."""
    from vllm.platforms import current_platform

    return current_platform.device_type
