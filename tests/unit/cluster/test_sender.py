"""The sender of a cluster without Ray: when it makes a process group, and what a lost engine costs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from paceline.cluster.sender import RemoteSender
from paceline.cluster.specs import CurrentSettings
from paceline.config import EngineConfig, HistoryDrafter, SpeculationConfig
from paceline.orchestrator.members import Members
from paceline.types import EngineLostError, PacelineError, Receipt
from paceline.weights.distributed import GroupAddress
from paceline.weights.message import Push
from specs import engine_settings


class FakeLearner:
    """Counts groups; `broken` says why the next broadcast fails."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.timeouts_s: list[float] = []
        self.transmitted = 0
        self.broken: str | None = None
        self.absent: str | None = None
        self.version = 0
        """Names the policy that it has."""
        self.pushed = asyncio.Event()
        self.still = asyncio.Lock()
        self.num_restarts = 0
        self.dies_in_join = False

    async def update(self) -> None:
        async with self.still:
            self.pushed.clear()
            self.version += 1

    async def host_group(self, num_workers: int, timeout_s: float) -> GroupAddress:
        self.sizes.append(num_workers)
        self.timeouts_s.append(timeout_s)
        return GroupAddress(name=f"g{len(self.sizes)}", host="", port=1, size=1 + num_workers, timeout_s=timeout_s)

    async def join_group(self) -> str | None:
        if self.dies_in_join:
            self.dies_in_join, self.num_restarts = False, self.num_restarts + 1
            return "the learner was lost and restarted"
        return self.absent

    async def stage(self, version: int) -> Push:
        name = f"g{len(self.sizes)}"
        assert version == self.version or not self.version, "another policy is labeled with this version"
        return Push(version=version, target="policy", transport="distributed", channel=name, entries=())

    async def transmit(self) -> str | None:
        self.transmitted += 1
        return self.broken


class FakeEngine:
    def __init__(self, name: str) -> None:
        self.name = name
        self.dies_in_join = False
        self.settings = engine_settings()
        self.joined: tuple[str, int] = ("", 0)
        self.received: list[int] = []

    async def join_group(self, address: GroupAddress, first_rank: int) -> str | None:
        if self.dies_in_join:
            raise EngineLostError(self.name, "its process ended")
        self.joined = (address.name, first_rank)
        return None

    async def receive(self, push: Push) -> Receipt:
        error = None if push.channel == self.joined[0] else "not joined"
        self.received.append(push.version)
        return Receipt(engine=self.name, version=push.version, num_tensors=0, num_bytes=0, seconds=0.0, error=error)


class Scene:
    def __init__(self, workers: int = 1, transport: Any = "distributed") -> None:
        self.engines = [FakeEngine(f"engine-{i}") for i in range(3)]
        self.learner = FakeLearner()
        engines: Any = self.engines
        learner: Any = self.learner
        self.members = Members(engines)
        self.settings = CurrentSettings(EngineConfig(tensor_parallel_size=workers), None)
        self.sender = RemoteSender(learner, self.members, self.settings, transport)

    def send(self, version: int) -> dict[str, Receipt]:
        return {receipt.engine: receipt for receipt in asyncio.run(self.sender.send(version))}


def test_one_group_serves_all_pushes() -> None:
    """Every worker has a rank of its own, behind the sender's."""
    scene = Scene(workers=2)
    assert all(receipt.ok for version in (1, 2) for receipt in scene.send(version).values())
    assert scene.learner.sizes == [6]
    assert [engine.joined for engine in scene.engines] == [("g1", 1), ("g1", 3), ("g1", 5)]


def test_members_wait_for_each_other_as_long_as_a_push_allows() -> None:
    """A minute for all calls left 30 s: too few for a hundred ranks to meet. A worker must still give up before its
    engine is given up for it."""
    scene = Scene()
    scene.send(1)
    assert scene.learner.timeouts_s == [EngineConfig().push_deadline_s / 2] == [150]


def test_shared_memory_needs_no_group() -> None:
    scene = Scene(transport="shared_memory")
    scene.send(1)
    assert scene.learner.sizes == []


def test_group_is_made_anew_without_an_engine_that_was_lost() -> None:
    """A broadcast that waited for it would time out."""
    scene = Scene()
    scene.send(1)
    scene.members.lose("engine-1", "killed")
    receipts = scene.send(2)
    assert set(receipts) == {"engine-0", "engine-2"}
    assert all(receipt.ok for receipt in receipts.values())
    assert scene.learner.sizes == [3, 2]
    assert scene.engines[2].joined == ("g2", 2)


def test_group_is_made_anew_for_engines_that_were_restarted() -> None:
    """Their new processes have joined nothing, although their names are the same."""
    scene = Scene()
    scene.send(1)
    scene.sender.drop_group()
    assert all(receipt.ok for receipt in scene.send(2).values())
    assert scene.learner.sizes == [3, 3]


@pytest.mark.parametrize("transport", ["distributed", "shared_memory"])
def test_engine_that_takes_a_lost_ones_place_gets_the_last_policy_and_is_in_every_later_push(transport: str) -> None:
    scene = Scene(transport=transport)
    scene.send(1)
    scene.members.lose("engine-1", "killed")
    new: Any = FakeEngine("engine-1#2")
    if transport == "shared_memory":
        new.joined = ("g0", 0)
    assert asyncio.run(scene.sender.catch_up(new)).version == 1
    assert new.received == [1] and scene.engines[0].received == [1], "the others have it"
    assert scene.members.is_alive("engine-1#2")
    assert set(scene.send(2)) == {"engine-0", "engine-2", "engine-1#2"}
    if transport == "distributed":
        assert scene.learner.sizes == [3, 1, 3]


def test_engine_that_did_not_take_the_policy_does_not_join() -> None:
    scene = Scene(transport="shared_memory")
    scene.send(1)
    scene.members.lose("engine-1", "killed")
    new: Any = FakeEngine("engine-1#2")  # refuses
    assert not asyncio.run(scene.sender.catch_up(new)).ok
    assert scene.members.names == ["engine-0", "engine-2"]


def test_engine_that_comes_back_during_an_update_waits_for_its_push() -> None:
    """What the learner has then is no version yet; labeled with the last one it would be sampled from as that."""
    scene = Scene()
    new: Any = FakeEngine("engine-1#2")

    async def work() -> None:
        await scene.sender.send(0)
        scene.members.lose("engine-1", "killed")
        await scene.learner.update()
        catching_up = asyncio.create_task(scene.sender.catch_up(new))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not new.received
        await scene.sender.send(1)
        assert (await catching_up).version == 1

    asyncio.run(work())


def test_push_without_any_engine_is_no_push_and_the_next_engine_gets_it() -> None:
    """A broadcast to nobody but engines that are gone would time out."""
    scene = Scene()
    scene.send(1)
    for name in scene.members.names:
        scene.members.lose(name, "killed")
    assert scene.send(2) == {} and scene.learner.transmitted == 1
    new: Any = FakeEngine("engine-1#2")
    assert asyncio.run(scene.sender.catch_up(new)).version == 2


def test_engine_that_started_before_the_precision_was_changed_does_not_join() -> None:
    scene = Scene(transport="shared_memory")
    scene.send(1)
    scene.members.lose("engine-1", "killed")
    scene.settings.now = engine_settings(EngineConfig(dtype="float32"))
    new: Any = FakeEngine("engine-1#2")
    with pytest.raises(EngineLostError, match="precision"):
        asyncio.run(scene.sender.catch_up(new))


def test_engine_that_started_before_the_drafter_was_switched_does_not_join() -> None:
    """It would refuse every drafter that the others get."""
    scene = Scene()
    scene.send(1)
    scene.members.lose("engine-1", "killed")
    scene.settings.now = engine_settings(speculation=SpeculationConfig(drafter=HistoryDrafter()))
    new: Any = FakeEngine("engine-1#2")
    with pytest.raises(EngineLostError, match="drafter"):
        asyncio.run(scene.sender.catch_up(new))
    new.settings = scene.settings.now
    assert asyncio.run(scene.sender.catch_up(new)).ok


def test_engine_that_dies_while_the_group_is_made_is_lost_and_the_others_get_the_push() -> None:
    scene = Scene()
    scene.engines[0].dies_in_join = True
    scene.learner.absent = None
    receipts = scene.send(1)
    assert (receipts["engine-0"].lost, receipts["engine-0"].error) == (True, "its process ended")
    assert receipts["engine-1"].ok and receipts["engine-2"].ok
    assert scene.learner.sizes == [3, 2]
    assert scene.engines[0].received == []


def test_group_that_nobody_is_missing_from_and_that_still_fails_ends_the_run() -> None:
    """Trying again would wait for ever: a firewall between learner and engines."""
    scene = Scene()
    scene.learner.absent = "timed out"
    with pytest.raises(PacelineError, match="could not form a process group: timed out"):
        scene.send(1)


def test_group_is_made_anew_after_a_failed_broadcast() -> None:
    scene = Scene()
    scene.learner.broken = "connection closed by peer"
    scene.send(1)
    scene.learner.broken = None
    assert all(receipt.ok for receipt in scene.send(1).values())
    assert scene.learner.sizes == [3, 3]


@pytest.mark.parametrize("dies_in_join", [False, True])
def test_learner_that_was_started_again_gets_a_group_of_its_own(dies_in_join: bool) -> None:
    """Its predecessor's group has died with it, while the engines are the same as before."""
    scene = Scene()
    scene.send(1)
    scene.learner.num_restarts += 1
    scene.learner.dies_in_join = dies_in_join
    assert all(receipt.ok for receipt in scene.send(2).values())
    assert scene.learner.sizes == ([3, 3, 3] if dies_in_join else [3, 3])
