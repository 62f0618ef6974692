"""Weight sync from the learner to engines, for the policy and the drafter."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from paceline.cluster.proxies import RemoteEngine, remote
from paceline.cluster.remote_learner import RemoteLearner
from paceline.cluster.specs import CurrentSettings
from paceline.devices import Transport
from paceline.orchestrator.members import Members
from paceline.types import EngineLostError, PacelineError, Receipt
from paceline.weights.distributed import GroupAddress
from paceline.weights.message import Push


class RemoteSender:
    """types.Sender: the learner stages a version once, and all engines receive it concurrently.

    With the distributed transport, the learner and the engines' workers form a process group. It is created before the
    first push, and again after a change of members, a restart or a failed broadcast. A restarted engine catches up in a
    push and a group without the other engines.
    """

    def __init__(
        self,
        learner: RemoteLearner,
        members: Members,
        settings: CurrentSettings,
        transport: Transport,
        drafter: Path | None = None,
    ) -> None:
        """`drafter` is the checkpoint of a trained drafter."""
        self._learner = learner
        self._members = members
        self._settings = settings
        self._transport = transport
        self._drafter = drafter
        self._version = 0
        self._group: list[str] = []
        """Names of the engines in the process group; empty if there is no valid group."""
        self._group_restarts = 0
        """Restarts of the learner when the group was created."""
        self._one_push = asyncio.Lock()

    async def send(self, version: int) -> Sequence[Receipt]:
        async with self._one_push:
            self._version = version
            engines = self._alive()
            receipts = await self._push(engines, version, self._stage) if engines else []
            self._learner.pushed.set()
            return receipts

    async def catch_up(self, engine: RemoteEngine) -> Receipt:
        """Push the current version to a new engine, and make it a member in the same critical section: the next push
        would miss it otherwise. Wait while the learner's policy is newer than the last push."""
        while True:
            await self._learner.pushed.wait()
            async with self._learner.still, self._one_push:
                if not self._learner.pushed.is_set():
                    continue
                if engine.settings != self._settings.now:
                    why = "the engines' precision or drafter has changed since its start"
                    raise EngineLostError(engine.name, why)
                (receipt,) = await self._push([engine], self._version, self._stage)
                if receipt.ok:
                    self._members.join(engine)
                return receipt

    async def send_drafter(self, file: Path, version: int) -> Sequence[Receipt]:
        """Push the drafter with the trained tensors of `file`."""
        assert self._drafter is not None
        weights = self._drafter / "model.safetensors"
        async with self._one_push:
            return await self._push(self._alive(), version, lambda: self._learner.stage_drafter(weights, file, version))

    async def stop_speculation(self) -> None:
        # The fleet detects a lost engine at its next call.
        await asyncio.gather(*(engine.stop_speculation() for engine in self._alive()), return_exceptions=True)

    def drop_group(self) -> None:
        """Drop the process group, which restarted engines have not joined."""
        self._group = []

    def _stage(self) -> Awaitable[Push]:
        return self._learner.stage(self._version)

    def _alive(self) -> list[RemoteEngine]:
        return [remote(engine) for engine in self._members.engines]

    async def _push(
        self, engines: Sequence[RemoteEngine], version: int, stage: Callable[[], Awaitable[Push]]
    ) -> Sequence[Receipt]:
        lost = await self._make_group(engines, version) if self._transport == "distributed" else []
        gone = {receipt.engine for receipt in lost}
        push = await stage()
        transmitting = asyncio.create_task(self._learner.transmit())
        receipts = await asyncio.gather(*(self._deliver(engine, push) for engine in engines if engine.name not in gone))
        if await transmitting is not None:  # the engines' receipts have the error
            self._group = []
        return [*lost, *receipts]

    async def _make_group(self, engines: Sequence[RemoteEngine], version: int) -> list[Receipt]:
        """Create the process group unless it is valid. Return receipts of engines lost on the way."""
        lost: list[Receipt] = []
        while True:
            gone = {receipt.engine for receipt in lost}
            left = [engine for engine in engines if engine.name not in gone]
            wanted = [engine.name for engine in left]
            if wanted == self._group and self._group_restarts == self._learner.num_restarts:
                return lost
            self._group_restarts = self._learner.num_restarts
            config = self._settings.now.engine
            workers = config.tensor_parallel_size
            # A worker must time out and refuse the push before the deadline of its engine, which would lose the engine.
            timeout_s = config.push_deadline_s / 2
            address = await self._learner.host_group(len(left) * workers, timeout_s)
            joining = [self._join(engine, address, 1 + i * workers, version) for i, engine in enumerate(left)]
            answers = await asyncio.gather(self._learner.join_group(), *joining)
            missing = [answer for answer in answers if isinstance(answer, Receipt)]
            problems = [answer for answer in answers if isinstance(answer, str)]
            if problems and not missing and self._group_restarts == self._learner.num_restarts:
                raise PacelineError(f"weights: learner and engines could not form a process group: {problems[0]}")
            lost.extend(missing)
            self._group = [] if missing or problems else wanted

    async def _join(
        self, engine: RemoteEngine, address: GroupAddress, first_rank: int, version: int
    ) -> Receipt | str | None:
        try:
            return await engine.join_group(address, first_rank)
        except EngineLostError as lost:
            return _lost_receipt(engine, version, lost)

    async def _deliver(self, engine: RemoteEngine, push: Push) -> Receipt:
        try:
            return await engine.receive(push)
        except EngineLostError as lost:
            return _lost_receipt(engine, push.version, lost)


def _lost_receipt(engine: RemoteEngine, version: int, lost: EngineLostError) -> Receipt:
    return Receipt(
        engine=engine.name, version=version, num_tensors=0, num_bytes=0, seconds=0.0, error=lost.why, lost=True
    )
