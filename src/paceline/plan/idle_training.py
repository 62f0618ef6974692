"""Drafter training on idle engines, simulated: the real leases and rounds, with trainers that only take time.

A trainer trains so many tokens a second while its slot is leased. Once a round of tokens is full it is judged better,
published, and the engines draft as well as the trained drafter does. How much better that is, is an input: learning
is not simulated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.config import DrafterTrainingConfig, LeaseConfig
from paceline.drafters.drift import Verdict
from paceline.drafters.provenance import Provenance
from paceline.orchestrator.drafter_training import OnlineDrafterTraining
from paceline.orchestrator.members import Members
from paceline.plan.batching import BatchingEngine
from paceline.plan.engine_model import StepModel
from paceline.types import Receipt

ROUND_TOKENS = 1_000_000
"""Tokens trained on before a drafter of a policy with billions of parameters is judged."""


@dataclass(slots=True)
class MemoryStore:
    """DrafterStore without weights: only the numbers that the run asks for."""

    accepted_length: Callable[[int], float]
    """Accepted length of each base on the held-out slice."""
    _round: int = 0
    _published: int = 0
    _fresh_tokens: int = 0
    _tokens_trained: int = 0
    _training_s: float = 0.0
    _verdicts: dict[int, Verdict] = field(default_factory=dict)

    def judge(self) -> None:
        """What a trainer does first: compare a new base with the published one."""
        if self._round != self._published and self._round not in self._verdicts:
            before, after = self.accepted_length(self._published), self.accepted_length(self._round)
            self._verdicts[self._round] = Verdict(publish=after > before, why="", before=before, after=after)

    def train(self, seconds: float, num_tokens: int) -> None:
        """What a trainer has done in one lease."""
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
    """Tells the store what it has trained when it is recalled."""

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


@dataclass(slots=True)
class _DrafterWire:
    """The engines draft as the trained drafter does from the first publication on."""

    engines: Sequence[BatchingEngine]
    trained: StepModel

    async def send_drafter(self, number: int) -> Sequence[Receipt]:
        for engine in self.engines:
            engine.use(self.trained)
        return [
            Receipt(engine=engine.name, version=number, num_tensors=1, num_bytes=1, seconds=0.0)
            for engine in self.engines
        ]

    async def stop_speculation(self) -> None:
        raise AssertionError("a simulated drafter is never lost")


def idle_training(
    *, trained: StepModel, accepted_length: tuple[float, float], tokens_per_s: float
) -> Callable[[Members, Sequence[BatchingEngine]], OnlineDrafterTraining]:
    """Drafter training for `run_model.simulate`. `accepted_length` is that of the drafter before and after training.
    The learner has GPUs of its own, so every engine's slot may be leased while it works."""
    before, after = accepted_length

    def start(members: Members, engines: Sequence[BatchingEngine]) -> OnlineDrafterTraining:
        store = MemoryStore(lambda number: after if number else before)
        lease = LeaseConfig(lease_s=600)
        config = DrafterTrainingConfig(mode="idle", when="always", round_tokens=ROUND_TOKENS, lease=lease)
        trainers = [SimulatedTrainer(store, tokens_per_s) for _ in engines]
        sender = _DrafterWire(engines, trained)
        return OnlineDrafterTraining(members, trainers, sender, store, config, apart=members.names)

    return start


def leased_share(drafting: Mapping[str, float]) -> float:
    """Share of the engines' idle time that was leased."""
    leasable_s = drafting.get("draft/leasable_s")
    return drafting.get("draft/leased_s", 0.0) / leasable_s if leasable_s else 0.0
