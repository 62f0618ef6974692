"""Faults planted in a running engine's policy, to see whether fingerprints find them."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from paceline.fp8 import KvScales
from paceline.rollout.internals.fp8_layers import held_codes, held_scale, quantised_layers
from paceline.rollout.internals.kv_scales import scaled_attention, set_kv_scales
from paceline.rollout.worker import WorkerExtension

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.worker.gpu_worker import Worker


def allow_faults(args: AsyncEngineArgs) -> None:
    """For `VllmEngine.start(adjust=...)`: an engine whose workers can be damaged."""
    args.worker_extension_cls = "benchmarks.planted.policy.FaultyWorkerExtension"


class FaultyWorkerExtension(WorkerExtension):
    """An engine's worker that damages itself when it is asked to."""

    def plant_fault(self, kind: str) -> None:
        """Change one bit of one layer (`weight`), one block's scale (`scale`), or set all KV scales to 1
        (`kv_scales`)."""
        model = cast("Worker", self).get_model()
        if kind in ("weight", "scale"):
            _, layer = next(quantised_layers(model))
            if kind == "weight":
                held_codes(layer).view(torch.uint8)[0, 0] ^= 1
            else:
                held_scale(layer)[0, 0] *= 2
        elif kind == "kv_scales":
            ones = (1.0,) * len(scaled_attention(model))
            set_kv_scales(model, KvScales(version=0, q=ones, k=ones, v=ones))
        else:
            raise ValueError(f"kind: got {kind!r}; must be weight, scale or kv_scales")
