"""What online drafter training works with: the store of its data and rounds, and the sender of its drafters"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from paceline.drafters.drift import Verdict
from paceline.drafters.provenance import Provenance
from paceline.types import Receipt


class DrafterStore(Protocol):
    """Training data and rounds of the drafter, which the run shares with its trainers."""

    def has_documents(self) -> bool:
        """Whether there is anything to train on."""
        ...

    def round(self) -> int:
        """Number of the newest base; 0 is the drafter that the run began with."""
        ...

    def published(self) -> int:
        """Number of the base that the engines have."""
        ...

    def fresh_tokens(self) -> int:
        """Tokens trained on in the present round, by all trainers together."""
        ...

    def slices_made(self) -> bool:
        """Whether every trainer has made its counted slices for the newest policy."""
        ...

    def close_round(self) -> None:
        """Average what the trainers have made of the newest base into the next."""
        ...

    def verdict(self, number: int) -> Verdict | None:
        """What a trainer found about a base; None before it has."""
        ...

    def publish(self, number: int) -> None:
        """Note that the engines have this base."""
        ...

    def revert(self) -> int:
        """Go on from the published base, under a new number, which counts as published; returns that number."""
        ...

    def forget(self) -> None:
        """Remove what is older than the newest base, except the published one."""
        ...

    def training_s(self) -> float:
        """Seconds that all trainers have spent since the run began."""
        ...

    def tokens_trained(self) -> int:
        """Tokens that all trainers have trained on since the run began."""
        ...

    def keep_in(self, file: Path) -> None:
        """From now on `keep` copies to this file."""
        ...

    def copy_to(self, directory: Path) -> None:
        """Copy what training goes on from into a new directory: bases with their optimizer, verdicts, progress."""
        ...

    def copy_from(self, directory: Path) -> None:
        """Take over what `copy_to` wrote."""
        ...

    def keep(self, number: int) -> None:
        """Copy a base to where it survives a crash of the run, if there is such a place."""
        ...

    def metrics(self) -> Mapping[str, float]: ...

    def close(self) -> None: ...

    def save(self, directory: Path, provenance: Provenance | None) -> None:
        """Write the published drafter as a checkpoint, with what is known about it."""
        ...


class DrafterSender(Protocol):
    async def send_drafter(self, number: int) -> Sequence[Receipt]:
        """Push this base of the store to every engine."""
        ...

    async def stop_speculation(self) -> None:
        """No engine drafts any more."""
        ...
