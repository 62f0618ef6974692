"""A copy of tensors in host memory, from which those that were lost are put back."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from paceline.types import PacelineError
from paceline.weights.fingerprint import fingerprint


class HostCopy:
    """Tensors by name as they were when they were last kept, with the fingerprints that they had on their device."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[str, torch.Tensor]] = {}

    def keep(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy what has changed since the last time. A failure leaves no copy: an old one would undo later updates."""
        before, self._kept = self._kept, {}
        found = {name: fingerprint(tensor) for name, tensor in tensors.items()}
        self._kept = {
            name: before[name]
            if name in before and before[name][0] == found[name]
            else (found[name], tensor.detach().to("cpu", copy=True))
            for name, tensor in tensors.items()
        }

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """Put back what differs from the copy, in place; returns the names. What is no longer among the tensors is left
        alone."""
        lost = [
            name for name, (kept, _) in self._kept.items() if name in tensors and fingerprint(tensors[name]) != kept
        ]
        with torch.inference_mode():  # models may hold tensors that were made in it
            for name in lost:
                tensors[name].copy_(self._kept[name][1])
        if wrong := [name for name in lost if fingerprint(tensors[name]) != self._kept[name][0]]:
            raise PacelineError(f"{', '.join(wrong)}: put back, and still not what was kept")
        return lost
