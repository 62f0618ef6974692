"""The one weight message: what a sender tells every engine about a push, and what each worker answers.

Both become plain dicts where vLLM's rpc carries them (`deliver` and `WorkerExtension.receive_push`), and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from paceline.devices import Transport
from paceline.fp8 import KvScales
from paceline.weights.fingerprint import scale_fingerprint

Target = Literal["policy", "drafter"]

_ALIGNMENT = 64


def aligned(offset: int) -> int:
    """The first offset from here on at which a tensor of any dtype may begin."""
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """Where one tensor lies among the bytes of a push, and what it must be.

    Example: TensorEntry(name="model.norm.weight", dtype="bfloat16", shape=(256,), offset=64, num_bytes=512,
    fingerprint="9f…")
    """

    name: str
    dtype: str
    """As torch spells it, without `torch.`."""
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """One version of one model, staged and ready to be read."""

    version: int
    target: Target
    transport: Transport
    channel: str
    """Name of the segment in /dev/shm, or of the process group that the bytes are broadcast in."""
    entries: tuple[TensorEntry, ...]
    quantised: tuple[Mapping[str, str], ...] = ()
    """Fingerprints of what each worker of an FP8 engine must make of its part of the weights, in the order of their
    ranks: codes and scales of every quantised layer. Empty for other engines."""
    kv_scales: KvScales | None = None
    """For an engine with an FP8 KV cache."""

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries)

    @property
    def extent(self) -> int:
        """Bytes from the first offset to the end of the last tensor, gaps included."""
        return max((entry.offset + entry.num_bytes for entry in self.entries), default=0)

    @property
    def fingerprints(self) -> dict[str, str]:
        """Fingerprints of everything that the engine's first worker must hold after this push."""
        return self.fingerprints_of(0)

    def fingerprints_of(self, rank: int) -> dict[str, str]:
        """Fingerprints of everything that one worker must hold after this push. Workers differ in quantised layers
        alone: every one of them checks all bytes that arrive, and keeps its part of them."""
        scales = {} if self.kv_scales is None else self.kv_scales.named()
        arrived = {entry.name: entry.fingerprint for entry in self.entries}
        quantised = self.quantised[rank] if self.quantised else {}
        return arrived | dict(quantised) | {name: scale_fingerprint(scale) for name, scale in scales.items()}

    def to_dict(self) -> dict[str, Any]:
        """Plain types only: vLLM's rpc carries no classes without pickle."""
        return asdict(self)

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Push:
        with _typed("push"):
            entries = tuple(TensorEntry(**{**entry, "shape": tuple(entry["shape"])}) for entry in plain["entries"])
            scales = plain["kv_scales"]
            if scales is not None:
                scales = KvScales(version=scales["version"], **{part: tuple(scales[part]) for part in "qkv"})
            return cls(**{**plain, "entries": entries, "quantised": tuple(plain["quantised"]), "kv_scales": scales})


@dataclass(frozen=True, slots=True, kw_only=True)
class PushReport:
    """What one worker answers to a push."""

    version: int
    refused: str | None = None
    """Why the push was refused; None when it was applied."""
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    """Fingerprints of everything of this push that the model holds now, quantised layers and KV scales included; empty
    after a refusal."""
    verify_s: float = 0.0
    load_s: float = 0.0
    """vLLM's own loading: packing, quantising, copying into place."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> PushReport:
        with _typed("push report"):
            return cls(**plain)


@contextmanager
def _typed(what: str) -> Iterator[None]:
    """Turn what a message of another form runs into to an error that says so."""
    try:
        yield
    except (AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"{what}: got a message of another form ({error!r}); must be of this version") from error


def check_staged(version: int, entries: Sequence[TensorEntry]) -> None:
    """Raise ValueError for what no sender may stage."""
    if version < 0:
        raise ValueError(f"version: got {version}; must be 0 or more because versions count policy updates")
    if not entries:
        raise ValueError("weights: got no tensor; must be the whole model because an engine refuses a part of it")
