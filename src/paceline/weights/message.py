"""Messages of a weight push: `Push` from the sender to every engine, `PushReport` from each worker.

They are plain dicts only inside vLLM's rpc (`deliver` and `WorkerExtension.receive_push`).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from paceline.devices import Transport
from paceline.fp8 import KvScales
from paceline.weights.fingerprint import scale_fingerprint

Target = Literal["policy", "drafter"]

_ALIGNMENT = 64


def aligned(offset: int) -> int:
    """Round an offset up to the alignment of all dtypes."""
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """Location of one tensor among the bytes of a push, and its expected content.

    Example: TensorEntry(name="model.norm.weight", dtype="bfloat16", shape=(256,), offset=64, num_bytes=512,
    fingerprint="9f…")
    """

    name: str
    dtype: str
    """Torch's name without `torch.`."""
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """One staged version of one model."""

    version: int
    target: Target
    transport: Transport
    channel: str
    """Name of the segment in /dev/shm or of the process group."""
    entries: tuple[TensorEntry, ...]
    quantized: tuple[Mapping[str, str], ...] = ()
    """Expected fingerprints of codes and scales of every quantized layer, per worker of an FP8 engine in rank order.
    Empty for other engines."""
    kv_scales: KvScales | None = None
    """For engines with an FP8 KV cache."""

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries)

    @property
    def extent(self) -> int:
        """Bytes from the first offset to the end of the last tensor, gaps included."""
        return max((entry.offset + entry.num_bytes for entry in self.entries), default=0)

    def fingerprints_of(self, rank: int) -> dict[str, str]:
        """Return the expected fingerprints of one worker after this push. Workers differ only in quantized layers:
        every worker checks all received bytes and keeps its shard."""
        scales = {} if self.kv_scales is None else self.kv_scales.named()
        arrived = {entry.name: entry.fingerprint for entry in self.entries}
        quantized: Mapping[str, str] = self.quantized[rank] if self.quantized else {}
        return arrived | dict(quantized) | {name: scale_fingerprint(scale) for name, scale in scales.items()}

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain types: vLLM's rpc needs pickle for classes."""
        return asdict(self)

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Push:
        with _typed("push"):
            entries = tuple(TensorEntry(**dict[str, Any](e, shape=tuple(e["shape"]))) for e in plain["entries"])
            scales = None if plain["kv_scales"] is None else KvScales.from_dict(plain["kv_scales"])
            parsed = {"entries": entries, "quantized": tuple(plain["quantized"]), "kv_scales": scales}
            return cls(**dict[str, Any](plain, **parsed))


@dataclass(frozen=True, slots=True, kw_only=True)
class PushReport:
    """Answer of one worker to a push."""

    version: int
    refused: str | None = None
    """Reason for a refusal; None if the push was applied."""
    fingerprints: Mapping[str, str] = field(default_factory=dict[str, str])
    """Fingerprints of the loaded tensors, quantized layers and KV scales included; empty after a refusal."""
    verify_s: float = 0.0
    load_s: float = 0.0
    """Time that vLLM spent packing, quantizing and copying."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> PushReport:
        with _typed("push report"):
            return cls(**plain)


@contextmanager
def _typed(what: str) -> Generator[None]:
    try:
        yield
    except (AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"{what}: got a malformed message ({error!r}); must be from the same version") from error


def check_staged(version: int, entries: Sequence[TensorEntry]) -> None:
    if version < 0:
        raise ValueError(f"version: got {version}; must be 0 or more because versions count policy updates")
    if not entries:
        raise ValueError("weights: got no tensor; must be the whole model because engines refuse incomplete pushes")
