"""Entry points `vllm.general_plugins`: vLLM calls them in every process that it starts, ours or not.

Two, because vLLM's own VLLM_PLUGINS can leave one out: `VLLM_PLUGINS=paceline` is the stock sampler, which certify must find wrong.
"""

from __future__ import annotations

from paceline.rollout import compat

_TRANSFER = "paceline.rollout.backends"
# Backend name, as `weight_transfer_config` spells it, and the class in backends.py that serves it in the engine's worker.
_BACKENDS = (
    ("paceline_shm", "ShmWeightTransferEngine"),
    ("paceline_nccl", "FingerprintedNcclEngine"),
    ("paceline_ipc", "FingerprintedIpcEngine"),
)


def register() -> None:
    """Initialise AMX and make the weight wire known to vLLM. Changes nothing for an engine that does not name our backend."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    compat.initialise_amx()
    for name, class_name in _BACKENDS:
        # vLLM may load plugins more than once in a process, and its factory refuses a name that it knows.
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, _TRANSFER, class_name)


def mend() -> None:
    """Make speculation sound where this vLLM's sampler is not."""
    compat.mend_sampler()
