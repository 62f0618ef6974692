"""vLLM's registry of weight transfer backends, asked whether it knows a name.

vLLM may load plugins more than once in a process, its factory refuses a name that it knows, and it cannot be asked.
Relied upon: vllm/distributed/weight_transfer/factory.py, `WeightTransferEngineFactory._registry` and
`register_engine(name, module, class_name)`. Goes when registering a backend twice is allowed.
"""

from __future__ import annotations


def register_backend(name: str, module: str, class_name: str) -> None:
    """Make a backend known to vLLM, once per process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if name not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(name, module, class_name)
