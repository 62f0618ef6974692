"""A learner that is lost comes back as what it was, and a checkpoint bounds what has to be done again for that."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray.exceptions as ray_errors

from paceline.cluster import remote_learner
from paceline.cluster.remote_learner import RemoteLearner
from paceline.cluster.specs import CurrentSettings
from paceline.config import EngineConfig
from paceline.files import atomic_directory
from paceline.orchestrator.store import Store
from paceline.types import LearnerLostError, PacelineError
from specs import learner_spec


class Method:
    """An actor's method, as Ray lets one call it."""

    def __init__(self, answer: Callable[..., Any]) -> None:
        self._answer = answer

    async def remote(self, *args: Any) -> Any:
        await asyncio.sleep(0)
        return self._answer(*args)


class Rank:
    """A learner whose policy is the list of what it was trained on. Its process ends before the calls in `dies_in`."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self.policy: list[Any] | None = None
        self.called: list[str] = []

    def __getattr__(self, method: str) -> Method:
        return Method(lambda *args: self._call(method, *args))

    def _call(self, method: str, *args: Any) -> Any:
        self.called.append(method)
        if method in self._room.dies_in:
            self._room.dies_in.remove(method)
            self.policy = None
            raise ray_errors.ActorDiedError()
        if method == "start":
            self.policy = []
            return None
        assert self.policy is not None, "asked before its start, or after its end"
        match method:
            case "apply" | "calibrate":
                self.policy.append([method, *args])
            case "save_state":
                Path(args[0]).mkdir(parents=True)
                (Path(args[0]) / "policy.json").write_text(json.dumps(self.policy))
            case "load_state":
                self.policy = json.loads((Path(args[0]) / "policy.json").read_text())
            case "counters":
                return {}
            case "full_disk":
                cause = OSError(28, "No space left on device")
                raise ray_errors.RayTaskError("save", "", cause)
            case _:
                return list(self.policy)
        return {}


class Room:
    """Makes learners, and kills them as it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, max_restarts: int = 3, heals: bool = True) -> None:
        monkeypatch.setattr(remote_learner.ray, "put", lambda value: value)
        monkeypatch.setattr(remote_learner.ray, "kill", lambda actor: None)
        self.dies_in: list[str] = []
        self.lives: list[Rank] = []
        self.events: list[str] = []
        self.learner = RemoteLearner(
            self._create, learner_spec(), CurrentSettings(EngineConfig(), None), max_restarts=max_restarts
        )
        if heals:
            self.learner.heal(lambda what, **fields: self.events.append(what))

    def _create(self) -> Sequence[Any]:
        self.lives.append(Rank(self))
        return [self.lives[-1]]

    async def start(self) -> RemoteLearner:
        await self.learner.start()
        return self.learner


def samples(name: str) -> Any:
    return [name]


async def checkpoint(learner: RemoteLearner, store: Store, step: int) -> None:
    with store.writing(step, {}) as partial:
        await learner.save_state(str(partial / "learner"))


@pytest.mark.parametrize("dies_in", ["apply", "score", "calibrate", "save_state", "stage"])
def test_learner_lost_in_any_call_is_the_same_learner_afterward(monkeypatch, tmp_path, dies_in):
    room, store = Room(monkeypatch), Store(tmp_path / "state")

    async def steps() -> Any:
        learner = await room.start()
        for step in range(1, 5):
            if step == 4:
                room.dies_in = [dies_in]
            await learner.score(samples("s"))
            await learner.apply(samples(f"batch {step}"))
            await learner.calibrate(samples(f"batch {step}"), step)
            if step % 2 == 0:
                await checkpoint(learner, store, step)
            await learner.stage(step)
        return await learner.stage(5), await learner.counters()

    policy, counters = asyncio.run(steps())
    expected = [[method, [f"batch {step}"], *rest] for step in range(1, 5) for method, rest in parts_of(step)]
    assert policy == expected
    assert counters["learner/restarted"] == 1 and room.events == ["learner_lost", "learner_healed"]
    assert room.lives[1].called[:2] == ["start", "load_state"]
    assert room.lives[1].called.count("apply") <= 2, "steps that the checkpoint covers are not repeated"


def parts_of(step: int) -> list[tuple[str, list[int | None]]]:
    return [("apply", [None]), ("calibrate", [step])]


def test_calls_are_kept_until_a_checkpoint_has_its_name(monkeypatch, tmp_path):
    """A checkpoint that never got it, because the disk was full, covers nothing."""
    room = Room(monkeypatch)

    async def steps() -> Any:
        learner = await room.start()
        await learner.apply(samples("a"))
        with pytest.raises(OSError, match="No space left"), atomic_directory(tmp_path / "step-1") as partial:
            await learner.save_state(str(partial / "learner"))
            raise OSError(28, "No space left on device")
        await learner.apply(samples("b"))
        room.dies_in = ["score"]
        return await learner.score(samples("s"))

    assert asyncio.run(steps()) == [["apply", ["a"], None], ["apply", ["b"], None]]
    assert room.lives[1].called == ["start", "apply", "apply", "score"]


def test_run_that_was_resumed_goes_back_to_where_it_was_resumed(monkeypatch, tmp_path):
    room, store = Room(monkeypatch), Store(tmp_path / "state")

    async def steps() -> Any:
        learner = await room.start()
        await learner.apply(samples("a"))
        await checkpoint(learner, store, 1)
        learner.heal(lambda what, **fields: None)  # as another driver has it, which knows nothing of this one
        await learner.load_state(str(tmp_path / "state" / "step-00000001" / "learner"))
        await learner.apply(samples("b"))
        room.dies_in = ["score"]
        return await learner.score(samples("s"))

    assert asyncio.run(steps()) == [["apply", ["a"], None], ["apply", ["b"], None]]


def test_damaged_checkpoint_ends_the_run_instead_of_changing_the_policy(monkeypatch, tmp_path):
    room, store = Room(monkeypatch), Store(tmp_path / "state")

    async def steps() -> None:
        learner = await room.start()
        await learner.apply(samples("a"))
        await checkpoint(learner, store, 1)
        (tmp_path / "state" / "step-00000001" / "learner" / "policy.json").write_text("[]")
        room.dies_in = ["score"]
        await learner.score(samples("s"))

    with pytest.raises(PacelineError, match="differs from its checksum"):
        asyncio.run(steps())


def test_learner_that_always_dies_ends_the_run_and_says_so(monkeypatch):
    room = Room(monkeypatch, max_restarts=2)

    async def steps() -> None:
        learner = await room.start()
        room.dies_in = ["apply"] * 3
        await learner.apply(samples("a"))

    with pytest.raises(LearnerLostError, match=r"process ended during apply.*restarted 2 times in a row"):
        asyncio.run(steps())
    assert len(room.lives) == 3


def test_learner_that_dies_at_its_start_is_tried_again(monkeypatch):
    room = Room(monkeypatch)

    async def steps() -> Any:
        learner = await room.start()
        await learner.apply(samples("a"))
        room.dies_in = ["score", "start"]
        return await learner.score(samples("s"))

    assert asyncio.run(steps()) == [["apply", ["a"], None]]
    assert len(room.lives) == 3


def test_without_checkpoints_its_loss_ends_the_run(monkeypatch):
    room = Room(monkeypatch, heals=False)

    async def steps() -> None:
        learner = await room.start()
        room.dies_in = ["apply"]
        await learner.apply(samples("a"))

    with pytest.raises(LearnerLostError, match="the learner is lost: its process ended during apply"):
        asyncio.run(steps())


def test_nobody_asks_a_new_learner_before_it_is_what_the_old_one_was(monkeypatch):
    """An engine that catches up while the learner is made anew would get the policy of an earlier step."""
    room = Room(monkeypatch)

    async def steps() -> list[Any]:
        learner = await room.start()
        for name in "abc":
            await learner.apply(samples(name))
        room.dies_in = ["score"]
        scoring = asyncio.create_task(learner.score(samples("s")))
        while len(room.lives) == 1:
            await asyncio.sleep(0)
        return [await learner.stage(3), await scoring]

    staged, scored = asyncio.run(steps())
    assert len(staged) == len(scored) == 3


def test_a_full_disk_is_no_loss_of_the_learner(monkeypatch):
    room = Room(monkeypatch)

    async def steps() -> None:
        learner = await room.start()
        await learner._all("full_disk")

    with pytest.raises(PacelineError, match=r"the learner failed: .*No space left"):
        asyncio.run(steps())
    assert len(room.lives) == 1


def test_push_that_the_learner_was_lost_in_is_answered_as_failed(monkeypatch):
    """A broadcast cannot be repeated by one side alone."""
    room = Room(monkeypatch)

    async def steps() -> Any:
        learner = await room.start()
        room.dies_in = ["transmit"]
        return await learner.transmit()

    assert "lost" in asyncio.run(steps())
    assert room.lives[1].called == ["start"]
