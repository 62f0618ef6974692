"""Drafter store and trainer of a simulated run: training takes time and yields a given accepted length."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paceline.drafters.drift import Verdict
from paceline.drafters.provenance import Provenance


@dataclass(slots=True)
class MemoryStore:
    """DrafterStore without weights, with the numbers that a run reads."""

    accepted_length: Callable[[int], float]
    """Accepted length of each base on the held-out slice."""
    _round: int = 0
    _published: int = 0
    _fresh_tokens: int = 0
    _tokens_trained: int = 0
    _training_s: float = 0.0
    _verdicts: dict[int, Verdict] = field(default_factory=dict)

    def judge(self) -> None:
        """Compare a new base with the published one, as a trainer does first."""
        if self._round != self._published and self._round not in self._verdicts:
            before, after = self.accepted_length(self._published), self.accepted_length(self._round)
            self._verdicts[self._round] = Verdict(publish=after > before, why="", before=before, after=after)

    def train(self, seconds: float, num_tokens: int) -> None:
        """Count the work of one lease."""
        self._training_s += seconds
        self._tokens_trained += num_tokens
        self._fresh_tokens += num_tokens

    def has_documents(self) -> bool:
        return True

    def slices_made(self) -> bool:
        return True

    def round(self) -> int:
        return self._round

    def published(self) -> int:
        return self._published

    def fresh_tokens(self) -> int:
        return self._fresh_tokens

    def close_round(self) -> None:
        self._round += 1
        self._fresh_tokens = 0

    def verdict(self, number: int) -> Verdict | None:
        return self._verdicts.get(number)

    def publish(self, number: int) -> None:
        self._published = number

    def revert(self) -> int:
        self.close_round()
        self._published = self._round
        return self._round

    def forget(self) -> None:
        return

    def training_s(self) -> float:
        return self._training_s

    def tokens_trained(self) -> int:
        return self._tokens_trained

    def copy_to(self, directory: Path) -> None:
        return

    def copy_from(self, directory: Path) -> None:
        return

    def keep_in(self, file: Path) -> None:
        raise AssertionError("there are no weights to keep")

    def keep(self, number: int) -> None:
        return

    def metrics(self) -> Mapping[str, float]:
        return {}

    def close(self) -> None:
        return

    def save(self, directory: Path, provenance: Provenance | None) -> None:
        raise AssertionError("there are no weights to save")


@dataclass(slots=True)
class SimulatedTrainer:
    """Counts its work in the store when it is recalled."""

    store: MemoryStore
    tokens_per_s: float
    leased_at_s: float | None = None
    end: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self, *, awaited: bool) -> None:
        return

    async def lease(self) -> float:
        self.leased_at_s = asyncio.get_running_loop().time()
        self.store.judge()
        return 0.0

    async def recall(self) -> None:
        if self.leased_at_s is None:
            return
        seconds, self.leased_at_s = asyncio.get_running_loop().time() - self.leased_at_s, None
        self.store.train(seconds, int(seconds * self.tokens_per_s))

    async def kill(self) -> None:
        self.leased_at_s = None
        self.end.set()

    async def ended(self) -> str:
        await self.end.wait()
        return "ended by the simulation"
