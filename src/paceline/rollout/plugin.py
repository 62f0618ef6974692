"""Entry points `vllm.general_plugins`: vLLM calls them in every process that it starts, ours or not.

Two, because vLLM's own VLLM_PLUGINS can leave one out: `VLLM_PLUGINS=paceline` is the stock sampler, which certify must
find wrong.
"""

from __future__ import annotations

from paceline.rollout.internals import amx, sampler_fix
from paceline.rollout.internals.registry import register_backend

_BACKEND = "paceline"
"""As `weight_transfer_config` spells it."""


def register() -> None:
    """Initialise AMX and make the weight wire known to vLLM. Changes nothing for an engine that does not name it."""
    amx.initialise_amx()
    register_backend(_BACKEND, "paceline.rollout.receiver", "PushReceiver")


def mend() -> None:
    """Make speculation sound where this vLLM's sampler is not."""
    sampler_fix.mend_sampler()
