"""Keep a copy of tensors in host memory and restore those that changed."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from paceline.types import PacelineError
from paceline.weights.fingerprint import fingerprint


class HostCopy:
    """Copies of tensors by name, with their fingerprints on the device."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[str, torch.Tensor]] = {}

    def keep(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy tensors that changed since the last call. A failure leaves no copy: an old one would undo updates."""
        before, self._kept = self._kept, {}
        found = {name: fingerprint(tensor) for name, tensor in tensors.items()}
        self._kept = {
            name: before[name]
            if name in before and before[name][0] == found[name]
            else (found[name], tensor.detach().to("cpu", copy=True))
            for name, tensor in tensors.items()
        }

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """Restore tensors that differ from the copy, in place; return their names. Ignore copies of other tensors."""
        lost = [
            name for name, (kept, _) in self._kept.items() if name in tensors and fingerprint(tensors[name]) != kept
        ]
        with torch.inference_mode():  # models may have tensors that were created in it
            for name in lost:
                tensors[name].copy_(self._kept[name][1])
        if wrong := [name for name in lost if fingerprint(tensors[name]) != self._kept[name][0]]:
            raise PacelineError(f"{', '.join(wrong)}: restored from the host copy, but the fingerprint still differs")
        return lost
