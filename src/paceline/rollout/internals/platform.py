"""Whether vLLM runs on the CPU: asked of vLLM itself, which may have been built for another platform than torch was.

Relies on `vllm/platforms/__init__.py` (`current_platform`), which vLLM's plugins use too. It can go when `EngineArgs`
chooses by itself what the CPU backend cannot do: chunked prefill of seeded requests, sleep mode.
"""

from __future__ import annotations


def on_cpu() -> bool:
    from vllm.platforms import current_platform

    return current_platform.is_cpu()
