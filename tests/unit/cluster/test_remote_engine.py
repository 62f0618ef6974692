"""An engine behind its actor, without Ray: its times on the driver's clock, how long a push may take, and every way in
which Ray says that its process is gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import ray.exceptions as ray_errors

from contexts import arena_config
from paceline.cluster import clock
from paceline.cluster.clock import RemoteClock
from paceline.cluster.proxies import RemoteEngine
from paceline.cluster.ray_session import object_store_bytes
from paceline.cluster.remote_learner import RemoteLearner
from paceline.cluster.specs import CurrentSettings
from paceline.config import EngineConfig
from paceline.types import DraftBin, EngineLostError, GroupId, PacelineError, Receipt, Rollout
from paceline.weights.message import Push
from specs import engine_settings, engine_spec, learner_spec

FAR_S = 5000.0
"""How much longer the other machine has been running."""


class Method:
    """An actor's method, as Ray lets one call it."""

    def __init__(self, answer: Callable[..., Awaitable[Any]]) -> None:
        self.remote = answer


class FakeActor:
    """An actor on a machine whose clock began FAR_S earlier; its answers take time, more on the way there than back."""

    def __init__(self, machine: str) -> None:
        self._machine = machine
        self._delays_s = iter([0.2, 0.01, 0.1, 0.05])
        self.push_s = 0.0
        self.submit = self.counters = Method(self._start)
        for name in ("start", "clock", "collect", "take_timeline", "receive"):
            setattr(self, name, Method(getattr(self, f"_{name}")))

    async def _start(self, *_: Any) -> int:
        return 1

    async def _clock(self) -> tuple[str, float]:
        await asyncio.sleep(next(self._delays_s, 0.05))
        return self._machine, self._now_s()

    async def _collect(self, _: float) -> list[Rollout]:
        began_s = self._now_s()
        await asyncio.sleep(0.05)
        nothing = np.empty(0, np.int32)
        return [
            Rollout(
                group_id=GroupId(0),
                index=0,
                prompt_ids=nothing,
                token_ids=nothing,
                logp=np.empty(0, np.float32),
                finish_reason="stop",
                version_spans=((0, 1),),
                engine="engine-0",
                started_s=began_s,
                finished_s=self._now_s(),
            )
        ]

    async def _take_timeline(self) -> list[DraftBin]:
        return [DraftBin(self._now_s(), 0.5, 1, 1, 1, 1, 1)]

    async def _receive(self, push: Push) -> Receipt:
        await asyncio.sleep(self.push_s)
        return Receipt(engine="engine-0", version=push.version, num_tensors=0, num_bytes=0, seconds=0.0)

    def _now_s(self) -> float:
        return time.monotonic() + (FAR_S if self._machine == "far" else 0.0)


def engine_on(machine: str, **deadlines: float) -> tuple[RemoteEngine, FakeActor]:
    actor = FakeActor(machine)
    return RemoteEngine(actor, engine_spec(settings=engine_settings(EngineConfig(**deadlines)))), actor  # pyright: ignore[reportArgumentType]


def test_times_of_another_machine_are_told_on_the_drivers_clock() -> None:
    """Compared as they are, a rollout would have ended an hour before the run began, and the report shows nothing."""
    engine, _ = engine_on("far")

    async def work() -> None:
        await engine.start()
        before_s = time.monotonic()
        (rollout,) = await engine.collect()
        (item,) = await engine.take_timeline()
        after_s = time.monotonic()
        # The quickest answer took 10 ms or, on a busy machine, a little more; so half of that may be wrong.
        assert before_s - 1 < rollout.started_s < rollout.finished_s < item.begin_s + 1 < after_s + 2
        assert rollout.finished_s - rollout.started_s >= 0.04

    asyncio.run(work())


def test_times_of_this_machine_are_left_alone() -> None:
    """Half a round trip added to them would be noise where there is none."""
    engine, actor = engine_on(clock.this_machine())

    async def work() -> None:
        await engine.start()
        began_s = time.monotonic()
        (rollout,) = await engine.collect()
        assert began_s <= rollout.started_s <= rollout.finished_s <= time.monotonic()

    asyncio.run(work())
    assert next(actor._delays_s) == 0.05, "it is asked three times at the start and never again"


def test_quickest_answer_counts_and_old_ones_are_forgotten() -> None:
    """An average would carry the delays of a busy engine, and one answer for ever the drift of the clocks."""
    far = RemoteClock()
    far.compare("far", asked_s=10.0, theirs_s=105.9, answered_s=12.0)  # the way there took nearly all of two seconds
    far.compare("far", asked_s=20.0, theirs_s=115.01, answered_s=20.02)
    far.compare("far", asked_s=30.0, theirs_s=125.9, answered_s=31.0)
    assert far.ahead_s == pytest.approx(-95.0)
    for second in range(40, 56):
        far.compare("far", asked_s=second, theirs_s=second + 96.5, answered_s=second + 1.0)
    assert far.ahead_s == pytest.approx(-96.0)


def test_push_may_take_longer_than_other_calls() -> None:
    """With the deadline of calls that answer at once, a large policy over a slow network lost every engine."""
    engine, actor = engine_on("far", deadline_s=0.4)
    actor.push_s = 0.5
    push = Push(version=3, target="policy", transport="distributed", channel="", entries=())
    assert asyncio.run(engine.receive(push)).version == 3
    hurried, actor = engine_on("far", deadline_s=0.04)
    actor.push_s = 30
    with pytest.raises(EngineLostError, match="receive did not answer"):
        asyncio.run(hurried.receive(push))


def raised_in_actor(error: Exception) -> ray_errors.RayError:
    """The error as Ray hands it to the caller."""
    return ray_errors.RayTaskError("EngineActor.submit", "Traceback ...", error).as_instanceof_cause()


LOST = [
    ray_errors.OutOfMemoryError("Task was killed due to the node running low on memory.\nMemory on the node ..."),
    ray_errors.OutOfMemoryError(""),
    ray_errors.ActorDiedError(),
    ray_errors.ActorUnavailableError("The actor is temporarily unavailable", b"a" * 16),
    ray_errors.WorkerCrashedError(),
    ray_errors.NodeDiedError("the node died"),
    ray_errors.LocalRayletDiedError(),
    ray_errors.ObjectLostError("a" * 56, None, ""),
    ray_errors.OwnerDiedError("a" * 56, None, ""),
    ray_errors.ObjectFetchTimedOutError("a" * 56, None, ""),
    ray_errors.OutOfDiskError("no space left"),
    ray_errors.ActorUnschedulableError("no node has room"),
    ray_errors.ActorPlacementGroupRemoved(),
    ray_errors.RaySystemError(OSError("connection reset")),
    raised_in_actor(ray_errors.ObjectLostError("a" * 56, None, "")),
    raised_in_actor(MemoryError()),
    raised_in_actor(OSError(12, "Cannot allocate memory")),
    raised_in_actor(EngineLostError("engine-0", "EngineCore died")),
]


@pytest.mark.parametrize("error", LOST, ids=lambda error: type(error).__name__)
def test_every_way_to_lose_a_process_is_the_loss_of_one_engine(error: Exception) -> None:
    """An engine that was killed for memory ended the whole run: Ray's error for that is no RayActorError."""
    engine, actor = engine_on("far")

    async def submit(_: Any) -> None:
        raise error

    actor.submit = Method(submit)
    with pytest.raises(EngineLostError) as lost:
        asyncio.run(engine.submit([]))
    assert lost.value.engine == "engine-0" and lost.value.why


@pytest.mark.parametrize("error", LOST, ids=lambda error: type(error).__name__)
def test_lost_learner_is_an_error_that_says_so(error: Exception) -> None:
    async def counters() -> None:
        raise error

    actor, other = FakeActor("far"), FakeActor("far")
    actor.counters, other.counters = Method(counters), Method(counters)
    learner = RemoteLearner(
        lambda: [actor, other], learner_spec(), CurrentSettings(EngineConfig(), None), max_restarts=3
    )
    with pytest.raises(PacelineError, match="the learner is lost: "):
        asyncio.run(learner.counters())


def test_mistake_in_a_request_is_no_loss_of_an_engine() -> None:
    """Each engine in turn would be given up for it."""
    engine, actor = engine_on("far")

    async def submit(_: Any) -> None:
        raise raised_in_actor(ValueError("prompt_ids: got 9 tokens"))

    actor.submit = Method(submit)
    with pytest.raises(ValueError):  # noqa: PT011  Ray keeps the type and wraps the text
        asyncio.run(engine.submit([]))


def test_object_store_grows_with_the_batch() -> None:
    """512 MB hold a small batch; what does not fit goes through the disk, at every step."""
    small = arena_config([])
    large = arena_config(
        ["rollout.prompts_per_step=512", "rollout.group_size=16", "rollout.engine.max_model_len=32768"],
    )
    memory = 2**40
    assert object_store_bytes(small, memory) == 512 * 2**20
    assert object_store_bytes(large, memory) == 4 * 16 * 512 * 16 * 32768
    assert object_store_bytes(large, 32 * 2**30) == int(0.3 * 32 * 2**30), "the rest is for engines and learner"
    assert object_store_bytes(large, 2**30) == 512 * 2**20
