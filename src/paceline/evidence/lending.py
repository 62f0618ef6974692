"""Drafter training on idle engines, simulated: the real coach and its leases, with trainers that only take time.

A trainer trains so many tokens a second while its place is lent. Once a round of tokens is full it is judged better, published, and
the engines draft as well as the trained drafter does. How much better that is, is an input: learning is not simulated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from paceline.config import DrafterTrainingConfig, EagleDrafter, LeaseConfig, SpeculationConfig
from paceline.draft.drift import Verdict
from paceline.draft.exchange import Exchange, Progress
from paceline.draft.worker import documents_in, rounds_in
from paceline.evidence.batching import BatchingEngine
from paceline.evidence.engine_model import StepModel
from paceline.run.coach import Coach
from paceline.types import Receipt

ROUND_TOKENS = 1_000_000
"""Trained until a drafter of billions-sized policies is judged."""
GRACE_S = 1.0


@dataclass(slots=True)
class SimulatedTrainer:
    """Notes what it has trained when it is recalled."""

    name: str
    exchange: Exchange
    tokens_per_s: float
    accepted_length: tuple[float, float]
    """Of the drafter before and after training."""
    leased_at_s: float | None = None
    end: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self) -> None:
        return

    async def ready(self) -> bool:
        return True

    async def lease(self) -> None:
        self.leased_at_s = asyncio.get_running_loop().time()
        number = self.exchange.round()
        if number != self.exchange.published() and self.exchange.verdict(number) is None:
            before, after = self.accepted_length
            self.exchange.put_verdict(number, Verdict(publish=after > before, why="", before=before, after=after))

    async def recall(self) -> None:
        import torch

        if self.leased_at_s is None:
            return
        seconds, self.leased_at_s = asyncio.get_running_loop().time() - self.leased_at_s, None
        progress = self.exchange.progress(self.name)
        tokens = progress.num_tokens + int(seconds * self.tokens_per_s)
        self.exchange.put_progress(self.name, Progress(training_s=progress.training_s + seconds, num_tokens=tokens))
        self.exchange.put_state(self.exchange.round(), self.name, {"drafter/fc.weight": torch.zeros(1)}, tokens)

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

    async def send_drafter(self, file: Path, version: int) -> Sequence[Receipt]:
        for engine in self.engines:
            engine.use(self.trained)
        return [Receipt(engine=engine.name, version=version, num_tensors=1, num_bytes=1, seconds=0.0) for engine in self.engines]

    async def stop_speculation(self) -> None:
        raise AssertionError("a simulated drafter is never lost")


def coaching(
    *, trained: StepModel, accepted_length: tuple[float, float], tokens_per_s: float
) -> Callable[[Sequence[BatchingEngine]], AbstractContextManager[Coach]]:
    """For `run_model.simulate`. The learner has GPUs of its own, so every engine may be lent while it works."""

    @contextmanager
    def conduct(engines: Sequence[BatchingEngine]) -> Iterator[Coach]:
        import torch
        from safetensors.torch import save_file

        with TemporaryDirectory() as scratch:
            checkpoint, directory = Path(scratch) / "drafter", Path(scratch) / "shared"
            checkpoint.mkdir()
            save_file({"fc.weight": torch.zeros(1)}, checkpoint / "model.safetensors")
            documents_in(directory).mkdir(parents=True)
            (documents_in(directory) / "1.head").touch()
            exchange = Exchange(rounds_in(directory), checkpoint)
            training = DrafterTrainingConfig(
                mode="idle", when="always", round_tokens=ROUND_TOKENS, lease=LeaseConfig(grace_s=GRACE_S, lease_s=600)
            )
            names = [engine.name for engine in engines]
            yield Coach(
                engines,
                [SimulatedTrainer(name, exchange, tokens_per_s, accepted_length) for name in names],
                _DrafterWire(engines, trained),
                SpeculationConfig(drafter=EagleDrafter(path=str(checkpoint)), training=training),
                checkpoint=checkpoint,
                directory=directory,
                apart=names,
            )

    return conduct


def leased_share(drafting: Mapping[str, float]) -> float:
    """Of the engines' idle time that was lent."""
    return drafting.get("draft/leased_s", 0.0) / drafting["draft/leasable_s"] if drafting.get("draft/leasable_s") else 0.0
