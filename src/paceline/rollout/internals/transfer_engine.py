"""Weight-transfer engines of a worker: the configured one, and ours beside it.

A push must not depend on the host's backend (none, NCCL, ours), nor disturb an update that the host makes through it.
So ours is kept on the worker under its own name and aimed at policy or drafter here, as the worker does for its own
engine. vLLM may load plugins more than once per process, and its factory refuses a known name and cannot be queried.

Relied upon:
  vllm/v1/worker/gpu_worker.py                    Worker: weight_transfer_engine, vllm_config, device, get_model,
                                                  get_draft_model, speculative_config
  vllm/distributed/weight_transfer/base.py        WeightTransferEngine: arguments of its constructor,
                                                  set_weight_update_target, reset_weight_update_target
  vllm/distributed/weight_transfer/factory.py     WeightTransferEngineFactory: _registry, register_engine(name, module,
                                                  class_name)
  vllm/config                                     set_current_vllm_config, which weight loaders read

Goes when vLLM keeps several backends in one worker and allows to register a backend twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker

_BESIDE = "_paceline_receiver"
Engine = TypeVar("Engine")


def register_backend(name: str, module: str, class_name: str) -> None:
    """Register a backend with vLLM, once per process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if name not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(name, module, class_name)


def engine_of(worker: Worker, kind: type[Engine]) -> Engine:
    """Return the worker's own engine if it is of this kind, otherwise ours, made on the first call."""
    own: Any = worker.weight_transfer_engine
    if isinstance(own, kind):
        return own
    if not hasattr(worker, _BESIDE):
        make: Any = kind
        setattr(worker, _BESIDE, make(None, worker.vllm_config, worker.device, worker.get_model()))
    return getattr(worker, _BESIDE)


def pushed_version(worker: Any, target: Literal["policy", "drafter"]) -> int | None:
    """Return the last pushed version, by either engine. None before a push, and for backends without versions."""
    for name in ("weight_transfer_engine", _BESIDE):
        applied = getattr(getattr(worker, name, None), "applied", None)
        if isinstance(applied, dict) and target in applied:
            return applied[target].version
    return None


@contextmanager
def aimed(engine: Any, worker: Worker, target: Literal["policy", "drafter"]) -> Iterator[None]:
    """Have the engine load into this model of the worker."""
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(worker.vllm_config):
        if target == "drafter":
            speculation: Any = worker.speculative_config
            engine.set_weight_update_target(worker.get_draft_model(), speculation.draft_model_config)
        try:
            yield
        finally:
            engine.reset_weight_update_target()
