"""A worker that loses its drafter on purpose, as level-2 sleep does on GPUs; vLLM loads it by name in its own
processes."""

from __future__ import annotations

from typing import Any, cast

import torch

from paceline.rollout.internals.drafter_model import own_weights
from paceline.rollout.worker import WorkerExtension
from paceline.weights.fingerprint import fingerprint


class WipingWorker(WorkerExtension):
    def lose_drafter_in(self, method: str) -> None:
        """From now on this method of vLLM's worker zeroes the drafter when it is done."""
        done = getattr(self, method)

        def lose(*args: Any, **kwargs: Any) -> None:
            done(*args, **kwargs)
            with torch.inference_mode():
                for weight in own_weights(cast("Any", self)).values():
                    weight.zero_()

        setattr(self, method, lose)

    def drafter_fingerprints(self) -> dict[str, str]:
        """Fingerprints of what the drafter has now."""
        return {name: fingerprint(weight) for name, weight in own_weights(cast("Any", self)).items()}
