"""Engines die, freeze and come back in a simulated run: no rollout is lost or doubled, and the run goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import pytest

from benchmarks.simulated import SimulatedEngine, SimulatedSender, long_tailed_lengths
from contexts import arena_config
from paceline.metrics import JsonlSink, Recorder, read_metrics
from paceline.orchestrator.healing import Healing
from paceline.orchestrator.loop import Parts, train
from paceline.orchestrator.members import Members, place_of
from paceline.orchestrator.supervision import BEAT_S, SILENT_S
from paceline.plan.simulate import SimulatedLearner, run_virtual, score_by_parity, simulated_prompts
from paceline.types import (
    EngineLostError,
    PacelineError,
    PendingGradients,
    Receipt,
    Rollout,
    RolloutRequest,
    Sample,
)

SETTINGS = [
    "run.steps=40",
    "rollout.prompts_per_step=8",
    "rollout.group_size=4",
    "rollout.engine.max_num_seqs=4",
    "eval.every=0",
]
START_S = 20.0


@dataclass(slots=True, kw_only=True)
class MortalEngine(SimulatedEngine):
    """Dies or freezes at a moment, or of a prompt; delivers what it had finished even after its death."""

    freeze_at_s: float | None = None
    poison: Callable[[RolloutRequest], bool] = lambda request: False

    async def submit(self, requests: Sequence[RolloutRequest]) -> None:
        await SimulatedEngine.submit(self, requests)
        if any(map(self.poison, requests)):
            self.lose_at_s = asyncio.get_running_loop().time()
            self._news.set()

    async def collect(self) -> Sequence[Rollout]:
        found = await SimulatedEngine.collect(self)
        if self.freeze_at_s is not None and asyncio.get_running_loop().time() >= self.freeze_at_s:
            await asyncio.Event().wait()
        return found

    @property
    def dead(self) -> bool:
        return self.lose_at_s is not None and asyncio.get_running_loop().time() >= self.lose_at_s


@dataclass(kw_only=True)
class SimulatedCluster(SimulatedSender):
    """healing.Restarter and sender: engines start in START_S, unless `start_fails`."""

    members: Members
    make: Callable[[str], MortalEngine]
    start_fails: Callable[[str], bool] = lambda name: False
    refuses: Callable[[str], bool] = lambda name: False
    version: int = 0
    started: list[str] = field(default_factory=list)

    async def send(self, version: int) -> Sequence[Receipt]:
        self.version = version
        self.engines = [engine for engine in self.engines if self.members.is_alive(engine.name)]
        return await super().send(version)

    def newest(self, name: str) -> MortalEngine:
        engine = self.members.newest(place_of(name))
        assert isinstance(engine, MortalEngine) and engine.name == name
        return engine

    async def beat(self, name: str) -> None:
        engine = self.newest(name)
        if engine.dead:
            raise EngineLostError(engine.name, "its process ended")
        if engine.freeze_at_s is not None and asyncio.get_running_loop().time() >= engine.freeze_at_s:
            await asyncio.Event().wait()

    async def start(self, name: str) -> None:
        await asyncio.sleep(START_S)
        self.started.append(name)
        if self.start_fails(name):
            raise EngineLostError(name, "did not start")
        self.members.register(self.make(name))

    async def catch_up(self, name: str) -> Receipt:
        engine = self.newest(name)
        error = "w: refused" if self.refuses(engine.name) else None
        if error is None:
            engine.policy_version = self.version
            self.engines = [*self.engines, engine]
            self.members.join(engine)
        return Receipt(engine=engine.name, version=self.version, num_tensors=1, num_bytes=1, seconds=0.0, error=error)


class RememberingLearner(SimulatedLearner):
    batches: list[list[Sample]]

    async def apply(self, samples: Sequence[Sample], *, pending: PendingGradients | None = None):
        self.batches.append(list(samples))
        return await super().apply(samples)


@dataclass
class Found:
    records: dict[str, list[dict[str, Any]]]
    batches: list[list[Sample]]
    cluster: SimulatedCluster

    def events(self, what: str) -> list[dict[str, Any]]:
        return [event for event in self.records.get("event", []) if event["what"] == what]

    def series(self, key: str) -> list[float]:
        return [record["metrics"][key] for record in self.records["step"]]

    def check_every_rollout_counts_once(self, num_groups: int) -> None:
        for step, batch in enumerate(self.batches):
            keys = [sample.rollout_id for sample in batch]
            assert len(set(keys)) == len(keys) == num_groups * 4
            assert all(sample.version_spans[0][0] == step for sample in batch), "sampled from another policy"


def simulate(
    tmp_path: Path,
    *,
    settings: Sequence[str] = (),
    num_engines: int = 2,
    fate: Callable[[str], dict[str, Any]] = lambda name: {},
    prompts: Any = None,
    learner_s: float = 0.0,
    **cluster_settings: Any,
) -> Found:
    """One run; `fate` says how an engine ends."""
    config = arena_config([*SETTINGS, *settings])
    recorder = Recorder(JsonlSink(tmp_path / "metrics.jsonl"))
    learner = RememberingLearner(seconds_per_token=learner_s)
    object.__setattr__(learner, "batches", [])
    found: list[SimulatedCluster] = []

    def make(name: str) -> MortalEngine:
        lengths = long_tailed_lengths(0)
        return MortalEngine(name=name, length_of=lengths, max_num_seqs=4, seconds_per_token=0.01, **fate(name))

    async def work() -> None:
        engines = [make(f"engine-{index}") for index in range(num_engines)]
        members = Members(engines)
        cluster = SimulatedCluster(members=members, engines=list(engines), make=make, **cluster_settings)
        found.append(cluster)
        parts = Parts(
            members=members,
            learner=learner,
            sender=cluster,
            prompts=prompts or simulated_prompts(),
            heldout=[],
            score=score_by_parity,
            healer=Healing(members, cluster, max_restarts=config.rollout.max_restarts),
        )
        await train(parts, config, recorder)

    try:
        run_virtual(work)
    finally:
        recorder.close()
    return Found(read_metrics(tmp_path / "metrics.jsonl"), learner.batches, found[0])


def test_engine_that_dies_in_mid_rollout_is_replaced_and_no_rollout_is_lost_or_doubled(tmp_path: Path) -> None:
    run = simulate(tmp_path, fate=lambda name: {"lose_at_s": 0.9} if name == "engine-0" else {})
    run.check_every_rollout_counts_once(8)
    (lost,), (back,) = run.events("engine_lost"), run.events("engine_healed")
    assert lost["engine"] == "engine-0" and lost["redispatched"] > 0
    assert back["engine"] == "engine-0#2" and START_S <= back["healing_s"] < START_S + 5
    assert sum(run.series("engine/lost")) == sum(run.series("engine/restarted")) == 1
    assert run.series("fleet/engines")[0] == 1 and run.series("fleet/engines")[-1] == 2, "it waited for the start"
    assert "engine-0#2" in {sample.engine for sample in run.batches[-1]}


def test_idle_engine_that_dies_is_found_by_its_heartbeat(tmp_path: Path) -> None:
    """Nobody asks anything of engines while the policy is updated, which takes a minute here."""
    fate = {"engine-0": {"lose_at_s": 30.0}}
    run = simulate(tmp_path, settings=["run.steps=3"], fate=lambda name: fate.get(name, {}), learner_s=0.02)
    (lost,) = run.events("engine_lost")
    assert lost["redispatched"] == 0 and 30 <= lost["time_s"] <= 30 + BEAT_S + 1
    assert run.series("fleet/engines")[0] == 2, "it was back before the update was over"


@pytest.mark.parametrize("num_engines", [1, 2])
def test_engine_that_freezes_is_found_in_15_seconds_and_replaced(tmp_path: Path, num_engines: int) -> None:
    run = simulate(
        tmp_path,
        num_engines=num_engines,
        fate=lambda name: {"freeze_at_s": 5.0} if name == "engine-0" else {},
    )
    run.check_every_rollout_counts_once(8)
    (lost,) = run.events("engine_lost")
    assert 5 + SILENT_S - BEAT_S <= lost["time_s"] <= 5 + 15
    assert len(run.batches) == 40 and run.events("engine_healed")


def test_loss_of_every_engine_is_waited_out(tmp_path: Path) -> None:
    run = simulate(tmp_path, fate=lambda name: {} if "#" in name else {"lose_at_s": 0.9})
    run.check_every_rollout_counts_once(8)
    assert len(run.batches) == 40 and len(run.events("engine_healed")) == 2


def test_run_ends_with_a_clear_error_when_no_engine_can_be_started_any_more(tmp_path: Path) -> None:
    with pytest.raises(PacelineError, match="every engine is lost, and none could be started again"):
        simulate(tmp_path, fate=lambda name: {"lose_at_s": 0.9}, start_fails=lambda name: True)
    events = read_metrics(tmp_path / "metrics.jsonl")["event"]
    assert len([event for event in events if event["what"] == "engine_restart_failed"]) == 2 * 3
    assert len([event for event in events if event["what"] == "engine_given_up"]) == 2


def test_without_restarts_the_last_engine_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(PacelineError, match="every engine is lost"):
        simulate(tmp_path, settings=["rollout.max_restarts=0"], fate=lambda name: {"lose_at_s": 0.9})


def test_engine_that_refuses_the_policy_does_not_join_and_is_started_again(tmp_path: Path) -> None:
    run = simulate(
        tmp_path,
        fate=lambda name: {"lose_at_s": 0.9} if name == "engine-0" else {},
        refuses=lambda name: name == "engine-0#2",
    )
    run.check_every_rollout_counts_once(8)
    assert [event["why"] for event in run.events("engine_restart_failed")] == ["w: refused"]
    assert [event["engine"] for event in run.events("engine_healed")] == ["engine-0#3"]
    assert "engine-0#2" not in {sample.engine for batch in run.batches for sample in batch}


def test_prompt_that_kills_engines_is_left_out_and_nothing_else_is(tmp_path: Path) -> None:
    """Rollouts of the fifth prompt kill whatever they are submitted to."""

    def fate(name: str) -> dict[str, Any]:
        return {"poison": lambda request: request.group_id.number == 5}

    run = simulate(tmp_path, num_engines=4, settings=["run.steps=30"], fate=fate)
    (quarantined,) = run.events("prompt_quarantined")
    assert quarantined["prompt"] == "simulated/5"
    assert sum(run.series("rollout/quarantined_groups")) == 1
    assert len(run.batches[0]) == 7 * 4 and all(len(batch) == 8 * 4 for batch in run.batches[1:])
    assert 5 not in {sample.rollout_id.group_id.number for sample in run.batches[0] if sample.rollout_id is not None}
    assert run.series("fleet/engines")[-1] == 4, "engines were given up for it"


def test_prompt_in_quarantine_is_not_sampled_in_the_next_epoch(tmp_path: Path) -> None:
    epoch = list(islice(simulated_prompts(), 8))
    prompts = chain.from_iterable(repeat(epoch, 100))

    def fate(name: str) -> dict[str, Any]:
        return {"poison": lambda request: request.group_id.number % 8 == 5}

    run = simulate(tmp_path, num_engines=4, settings=["run.steps=4"], fate=fate, prompts=iter(prompts))
    assert [len(batch) for batch in run.batches] == [28] * 4
    assert run.series("rollout/quarantined_groups") == [1, 1, 1, 1]
    assert run.series("engine/lost")[1:] == [0, 0, 0]


def test_driver_that_was_stopped_itself_takes_no_engine_for_frozen(tmp_path: Path) -> None:
    """A laptop that slept, or a reward that held the interpreter: nobody could answer meanwhile."""

    async def work() -> None:
        engine = MortalEngine(name="engine-0", length_of=lambda r: 1, max_num_seqs=1, seconds_per_token=0.0)
        members = Members([engine])
        cluster = SimulatedCluster(members=members, engines=[engine], make=lambda name: engine)
        found = Healing(members, cluster, max_restarts=1)
        journal: Any = None
        async with found.running(journal):
            await asyncio.sleep(10)
            loop: Any = asyncio.get_running_loop()
            loop._clock.now_s += 3600
            await asyncio.sleep(10)
        assert members.is_alive("engine-0")

    run_virtual(work)
