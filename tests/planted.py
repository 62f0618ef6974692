"""Parts of an engine that fail on purpose; vLLM loads them by name in its own processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from paceline.fp8 import KvScales
from paceline.rollout.internals.fp8_layers import held_codes, held_scale, quantized_layers
from paceline.rollout.internals.kv_scales import scaled_attention, set_kv_scales
from paceline.rollout.proposer import HistoryProposer
from paceline.rollout.scheduler import AdaptiveScheduler
from paceline.rollout.worker import WorkerExtension

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.worker.gpu_worker import Worker


class _EveryThird:
    """Passes calls of one method on, but raises at every third."""

    def __init__(self, inner: Any, method: str) -> None:
        self._inner, self._method, self._calls = inner, method, 0

    def __getattr__(self, name: str) -> Any:
        return self._call if name == self._method else getattr(self._inner, name)

    def _call(self, *args: Any) -> Any:
        self._calls += 1
        if self._calls % 3 == 0:
            raise RuntimeError("planted")
        return getattr(self._inner, self._method)(*args)


class FailingScheduler(AdaptiveScheduler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.selector: Any = _EveryThird(self.selector, "choose")


class FailingProposer(HistoryProposer):
    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__(vllm_config)
        self._history: Any = _EveryThird(self._history, "propose")


def allow_faults(args: AsyncEngineArgs) -> None:
    """For `VllmEngine.start(adjust=...)`: an engine with workers that can be damaged."""
    args.worker_extension_cls = "planted.FaultyWorkerExtension"


class FaultyWorkerExtension(WorkerExtension):
    """A worker that damages its own policy on request."""

    def plant_fault(self, kind: str) -> None:
        """Change one bit of one layer (`weight`), one block's scale (`scale`), or set all KV scales to 1
        (`kv_scales`)."""
        model = cast("Worker", self).get_model()
        if kind in ("weight", "scale"):
            _, layer = next(quantized_layers(model))
            if kind == "weight":
                held_codes(layer).view(torch.uint8)[0, 0] ^= 1
            else:
                held_scale(layer)[0, 0] *= 2
        elif kind == "kv_scales":
            ones = (1.0,) * len(scaled_attention(model))
            set_kv_scales(model, KvScales(version=0, q=ones, k=ones, v=ones))
        else:
            raise ValueError(f"kind: got {kind!r}; must be weight, scale or kv_scales")
