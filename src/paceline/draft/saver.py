"""Checkpoints of a drafter while it is trained: only what is trained, copied at once, written by a thread.

    save ── copy ──▶ pending ── thread ──▶ .FILE.partial ── rename ──▶ FILE
             │          └── the newest wins: one that is not yet begun is replaced
             └── all that training waits for

A file is whole or not there, and it holds the checksum of its own tensors: safetensors has none, and a flipped byte would load
silently. What is frozen belongs to the policy or to the drafter's directory, so that directory and this file make the whole drafter
again. A write that fails (a full disk) is counted and can be read; training goes on.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from paceline.draft.trainer import trained

if TYPE_CHECKING:
    from paceline.draft.checkpoint import Drafter

Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaverCounts:
    """What became of all that was saved; `num_saved` is the sum of the others once nothing is pending."""

    num_saved: int = 0
    num_written: int = 0
    num_replaced: int = 0
    """By a newer one, before they were written."""
    num_failed: int = 0
    stall_s: float = 0.0
    """Time that training has waited, in all."""

    def metrics(self) -> dict[str, float]:
        return {
            "draft/checkpoints_written": float(self.num_written),
            "draft/checkpoints_replaced": float(self.num_replaced),
            "draft/checkpoints_failed": float(self.num_failed),
            "draft/checkpoint_stall_s": self.stall_s,
        }


class Saver:
    """Keeps the newest weights in one file. `save` is called by one thread, that which trains."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.last_error: str | None = None
        """Why the last write that failed did so."""
        self._num_saved = self._num_written = self._num_replaced = self._num_failed = 0
        self._stall_s = 0.0
        self._changed = threading.Condition()
        self._pending: tuple[Weights, int] | None = None
        self._writing = False
        self._closed = False
        # A daemon: a process that ends without `close` is not held up, and the rename makes that safe.
        self._thread = threading.Thread(target=self._work, name="drafter-saver", daemon=True)
        self._thread.start()

    def save(self, weights: Weights, *, step: int) -> None:
        """Copy these weights and have the copy written. Returns as soon as the weights may change again."""
        began_s = time.perf_counter()
        copy = {
            name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format) for name, tensor in weights.items()
        }
        with self._changed:
            assert not self._closed, "closed"
            self._num_replaced += self._pending is not None
            self._pending = copy, step
            self._num_saved += 1
            self._changed.notify_all()
        self._stall_s += time.perf_counter() - began_s

    def flush(self) -> None:
        """Wait until all that was saved is written, replaced or has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending is None and not self._writing)

    def close(self) -> None:
        """Write what is pending, then end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def counts(self) -> SaverCounts:
        with self._changed:
            return SaverCounts(
                num_saved=self._num_saved,
                num_written=self._num_written,
                num_replaced=self._num_replaced,
                num_failed=self._num_failed,
                stall_s=self._stall_s,
            )

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
            except Exception as caught:  # noqa: BLE001  whatever ails the disk, training goes on
                error = caught
            with self._changed:
                self._writing = False
                self._num_written += error is None
                self._num_failed += error is not None
                if error is not None:
                    self.last_error = f"{self.file}: {error!r}"
                self._changed.notify_all()


def write(file: Path, weights: Weights, *, step: int) -> None:
    """Write tensors with their checksum in one move."""
    partial = file.with_name(f".{file.name}.partial")  # a fixed name: what a crash has left is overwritten
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(dict(weights), partial, metadata={"format": "pt", "step": str(step), "sha256": _checksum(weights)})
    partial.replace(file)


def restore(drafter: Drafter, file: Path) -> int:
    """Put what `file` holds into the drafter of the original directory (`checkpoint.load`); returns its step."""
    try:
        with safe_open(file, "pt") as tensors:
            facts = tensors.metadata() or {}
            weights = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ValueError(f"checkpoint: {file} cannot be read ({error}); must be a file that a `Saver` has written") from None
    if facts.get("sha256") != _checksum(weights):
        raise ValueError(
            f"checkpoint: {file} differs from its checksum; must be whole because damage loads silently: copy it again"
        )
    own = trained(drafter)
    shapes = {name: weight.shape for name, weight in own.items()}
    found = {name: weight.shape for name, weight in weights.items()}
    if shapes != found:
        differing = sorted(name for name in shapes.keys() | found.keys() if shapes.get(name) != found.get(name))
        raise ValueError(
            f"checkpoint: {file} differs from the drafter in {', '.join(differing)}; must be of the drafter that was trained: load "
            "the directory that training began with"
        )
    with torch.no_grad():
        for name, weight in own.items():
            weight.copy_(weights[name])
    return int(facts["step"])


def _checksum(weights: Weights) -> str:
    """Of names, types, shapes and bytes: none of them can change unnoticed."""
    total = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name]
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        total.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data)
    return total.hexdigest()
