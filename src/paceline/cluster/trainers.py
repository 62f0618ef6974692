"""Drafter trainers beside the engines, and the sender of finished training rounds."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from paceline.cluster.proxies import RemoteEngine, remote
from paceline.cluster.sender import RemoteSender
from paceline.drafters.rounds import Rounds, verify_weights
from paceline.drafters.worker import WorkerSettings
from paceline.files import ChecksumError
from paceline.orchestrator.members import Members
from paceline.types import Receipt


class RoundSender:
    """drafter_training.DrafterSender over the weight wire."""

    def __init__(self, sender: RemoteSender, rounds: Rounds) -> None:
        self._sender = sender
        self._rounds = rounds

    async def send_drafter(self, number: int) -> Sequence[Receipt]:
        file = self._rounds.file(number)
        try:
            await asyncio.to_thread(verify_weights, file)
        except (ChecksumError, FileNotFoundError) as error:  # the run continues with the previous drafter
            return [Receipt(engine="learner", version=number, num_tensors=0, num_bytes=0, seconds=0, error=str(error))]
        return await self._sender.send_drafter(file, number)

    async def stop_speculation(self) -> None:
        await self._sender.stop_speculation()


class RemoteTrainer:
    """slots.Trainer over an EngineActor, the parent of the training process."""

    def __init__(self, members: Members, settings: WorkerSettings) -> None:
        self._members = members
        self._settings = settings
        self.pid = 0

    def _engine(self) -> RemoteEngine:
        return remote(self._members.newest(self._settings.name))

    async def start(self, *, awaited: bool) -> None:
        self.pid = await self._engine().trainer_start(self._settings.model_copy(update={"awaited": awaited}))
        if awaited:
            await self._engine().trainer_ready()

    async def lease(self) -> float:
        return await self._engine().trainer_lease()

    async def recall(self) -> None:
        await self._engine().trainer_recall()

    async def kill(self) -> None:
        await self._engine().trainer_kill()

    async def ended(self) -> str:
        return f"exit code {await self._engine().trainer_ended()}"
