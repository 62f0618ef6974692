"""Asynchronous checkpoints of a drafter in training: copied immediately, written by a thread.

    save ── copy ──▶ pending ── thread ──▶ .FILE.*.partial ── rename ──▶ FILE
             │          └── a newer one replaces one that is not yet begun
             └── all that training waits for

Files hold trained tensors only; the drafter's original directory has the others. Failed writes, such as on a full
disk, are counted, and training continues.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from paceline.drafters.trainer import load_weights, trained
from paceline.files import SEAL, ChecksumError, atomic_file, remove_partials, seal, verify_seal

if TYPE_CHECKING:
    from paceline.drafters.checkpoint import Drafter

Weights = Mapping[str, torch.Tensor]


@dataclass(slots=True, kw_only=True)
class SaverCounts:
    """Outcomes of all saves. With nothing pending, `num_saved` is the sum of the other counts."""

    num_saved: int = 0
    num_written: int = 0
    num_replaced: int = 0
    """Replaced by a newer one before they were written."""
    num_failed: int = 0
    stall_s: float = 0.0
    """Total time that training has waited for copies."""

    def metrics(self) -> dict[str, float]:
        return {
            "draft/checkpoints_written": float(self.num_written),
            "draft/checkpoints_replaced": float(self.num_replaced),
            "draft/checkpoints_failed": float(self.num_failed),
            "draft/checkpoint_stall_s": self.stall_s,
        }


class Saver:
    """Keeps the newest weights in one file. Only the training thread calls `save`."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.last_error: str | None = None
        """Message of the last failed write."""
        self._counts = SaverCounts()
        self._changed = threading.Condition()
        self._pending: tuple[Weights, int] | None = None
        self._writing = False
        self._closed = False
        # A daemon thread, so that a process can exit without `close`; the rename makes that safe.
        self._thread = threading.Thread(target=self._work, name="drafter-saver", daemon=True)
        self._thread.start()

    def save(self, weights: Weights, *, step: int) -> None:
        """Copy the weights and queue the copy for writing."""
        began_s = time.perf_counter()
        copy = {
            name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
            for name, tensor in weights.items()
        }
        with self._changed:
            assert not self._closed, "closed"
            self._counts.num_replaced += self._pending is not None
            self._pending = copy, step
            self._counts.num_saved += 1
            self._counts.stall_s += time.perf_counter() - began_s
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until every save was written, replaced or has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending is None and not self._writing)

    def close(self) -> None:
        """Write the pending save, then end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def counts(self) -> SaverCounts:
        with self._changed:
            return replace(self._counts)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending is not None or self._closed)
                if self._pending is None:
                    return
                (weights, step), self._pending = self._pending, None
                self._writing = True
            error: Exception | None = None
            try:
                write(self.file, weights, step=step)
            except Exception as caught:  # noqa: BLE001  counted; training continues
                error = caught
            with self._changed:
                self._writing = False
                self._counts.num_written += error is None
                if error is not None:
                    self._counts.num_failed += 1
                    self.last_error = f"{self.file}: {error!r}"
                self._changed.notify_all()


def write(file: Path, weights: Weights, *, step: int) -> None:
    """Write tensors with their checksum atomically."""
    file.parent.mkdir(parents=True, exist_ok=True)
    remove_partials(file.parent, file.name)  # of a crash; a file has one writer
    with atomic_file(file, durable=True) as partial:
        save_file(dict(weights), partial, metadata={"seal": SEAL, "format": "pt", "step": str(step)})
        seal(partial)


def restore(drafter: Drafter, file: Path) -> int:
    """Load the tensors of `file` into the drafter of the original directory, and return their step."""
    try:
        verify_seal(file)
        with safe_open(file, "pt") as tensors:
            facts = tensors.metadata() or {}
            weights = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ValueError(f"checkpoint: {file} cannot be read ({error}); must be a file written by `Saver`") from None
    except ChecksumError as error:
        raise ValueError(f"checkpoint: {error}; copy it again") from None
    shapes = {name: weight.shape for name, weight in trained(drafter).items()}
    found = {name: weight.shape for name, weight in weights.items()}
    if shapes != found:
        differing = sorted(name for name in shapes.keys() | found.keys() if shapes.get(name) != found.get(name))
        raise ValueError(
            f"checkpoint: {file} differs from the drafter in {', '.join(differing)}; must be of the trained drafter: "
            "load the directory with which training started"
        )
    load_weights(drafter, weights, prefix="")
    return int(facts["step"])
