"""Protocols of online drafter training: the store of its data and rounds, and the sender of its drafters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from paceline.drafters.drift import Verdict
from paceline.drafters.provenance import Provenance
from paceline.types import Receipt


class DrafterStore(Protocol):
    """Training data and rounds of the drafter, shared with the trainers."""

    def has_documents(self) -> bool:
        """Return whether there is training data."""
        ...

    def round(self) -> int:
        """Return the number of the newest base; 0 is the initial drafter."""
        ...

    def published(self) -> int:
        """Return the number of the engines' base."""
        ...

    def fresh_tokens(self) -> int:
        """Return the tokens of all trainers in the current round."""
        ...

    def slices_made(self) -> bool:
        """Return whether every trainer has finished its slices for the newest policy."""
        ...

    def close_round(self) -> None:
        """Average the trainers' weights into the next base."""

    def verdict(self, number: int) -> Verdict | None:
        """Return a trainer's verdict on a base; None before it exists."""

    def publish(self, number: int) -> None:
        """Note that the engines have this base."""

    def revert(self) -> int:
        """Continue from the published base under a new number, which counts as published, and return the number."""
        ...

    def forget(self) -> None:
        """Remove bases before the newest, except the published one."""

    def training_s(self) -> float:
        """Return the seconds of all trainers since the run began."""
        ...

    def tokens_trained(self) -> int:
        """Return the tokens of all trainers since the run began."""
        ...

    def keep_in(self, file: Path) -> None:
        """Set the target of `keep`."""

    def copy_to(self, directory: Path) -> None:
        """Copy bases with their optimizer, verdicts and progress into a new directory."""

    def copy_from(self, directory: Path) -> None:
        """Restore the files of `copy_to`."""

    def keep(self, number: int) -> None:
        """Copy a base to the file of `keep_in`, which outlives the run."""

    def metrics(self) -> Mapping[str, float]: ...

    def close(self) -> None: ...

    def save(self, directory: Path, provenance: Provenance | None) -> None:
        """Write the published drafter and its provenance as a checkpoint."""


class DrafterSender(Protocol):
    async def send_drafter(self, number: int) -> Sequence[Receipt]:
        """Push this base of the store to every engine."""
        ...

    async def stop_speculation(self) -> None:
        """Stop speculation on every engine."""
