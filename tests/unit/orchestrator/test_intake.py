"""Which groups are in flight and which the learner takes: nothing too old, nothing lost, nothing twice."""

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from benchmarks.simulated import SimulatedEngine
from contexts import arena_config
from paceline.config import Config
from paceline.metrics import JsonlSink, Recorder
from paceline.orchestrator.batch_log import Taken
from paceline.orchestrator.fleet import Fleet
from paceline.orchestrator.groups import Sampling
from paceline.orchestrator.intake import Intake
from paceline.orchestrator.journal import Journal
from paceline.orchestrator.members import Members
from paceline.orchestrator.online_drafter import OnlineDrafter
from paceline.orchestrator.recovery import Recovery
from paceline.orchestrator.rewards import Scoring
from paceline.plan.simulate import finished_rollout, run_virtual, score_by_parity, simulated_prompts
from paceline.types import Group, GroupId, Prompt, Rollout, RolloutId, RolloutRequest

Lengths = Callable[[RolloutRequest], int]


def config_of(*settings: str) -> Config:
    small = ["run.steps=6", "rollout.prompts_per_step=4", "rollout.group_size=2"]
    return arena_config([*small, *settings])


@dataclass
class Streamed:
    """What the steps of one simulated run took."""

    taken: list[dict[int, Group]] = field(default_factory=list)
    requests: list[RolloutRequest] = field(default_factory=list)
    in_flight: list[tuple[int, int]] = field(default_factory=list)
    """After each opening: groups that were opened in all, and those that no step had taken."""
    waited_s: list[float] = field(default_factory=list)
    num_refused: int = 0
    num_dropped: int = 0

    def ages(self, step: int) -> list[int]:
        return [step - 1 - group.policy_version for group in self.taken[step - 1].values()]

    def positions(self) -> list[int]:
        return sorted(position for groups in self.taken for position in groups)


class DeafEngine(SimulatedEngine):
    """Does not hear that it should abort: it finishes and delivers what nobody wants any more."""

    async def abort(self, ids: Sequence[RolloutId]) -> None:
        return


def stream(
    config: Config,
    length_of: Lengths,
    *,
    num_engines: int = 2,
    slots: int = 4,
    learner_s: float = 0.5,
    engine: type[SimulatedEngine] = SimulatedEngine,
    lose_at_s: float | None = None,
    drop_at_s: Sequence[float] = (),
    recovery: Recovery | None = None,
    lessor: OnlineDrafter | None = None,
) -> Streamed:
    """Run all steps with a learner that takes `learner_s`; at `drop_at_s` some group that is sampled is dropped."""
    found = Streamed()

    async def work() -> None:
        def counted(request: RolloutRequest) -> int:
            found.requests.append(request)
            return length_of(request)

        engines = [
            engine(
                name=f"e{i}",
                length_of=counted,
                max_num_seqs=slots,
                seconds_per_token=0.01,
                lose_at_s=lose_at_s if i == 0 else None,
            )
            for i in range(num_engines)
        ]
        journal, loop = Journal(Recorder(JsonlSink(Path(os.devnull)))), asyncio.get_running_loop()
        fleet = Fleet(Members(engines), lessor or OnlineDrafter(), max_in_flight=slots, on_lost=lambda *_: None)
        async with fleet, Scoring(score_by_parity) as scoring:
            intake = Intake(simulated_prompts(), config, fleet, recovery or Recovery(None, config), journal, scoring)
            for at_s in drop_at_s:
                loop.call_at(at_s, _drop_one, fleet, found)
            for step in range(1, config.run.steps + 1):
                intake.open(step)
                found.in_flight.append((intake.prompts.num_taken, len(intake._open)))
                began_s = loop.time()
                found.taken.append(await intake.take(step))
                found.waited_s.append(loop.time() - began_s)
                await asyncio.sleep(learner_s)
                for one in engines:
                    one.policy_version = step
                intake.on_version(step)
            found.num_refused = fleet.ledger.num_duplicates

    run_virtual(work)
    return found


def _drop_one(fleet: Fleet, found: Streamed) -> None:
    sampled = [request.group_id for _, request in fleet.ledger._assigned.values()]
    if sampled:
        found.num_dropped += 1
        fleet._drop(fleet.ledger.drop(max(sampled)))


def random_lengths(seed: int, *, median: float = 40.0, sigma: float = 1.0) -> Lengths:
    """Every try of every rollout draws a length of its own."""
    return lambda request: int(
        np.random.default_rng((seed, request.group_id.number, request.index, request.group_id.attempt)).lognormal(
            np.log(median), sigma
        )
        + 1
    )


def one_long(position: int, length: int = 1000) -> Lengths:
    return lambda request: length if request.group_id == GroupId(position) else 10


def test_a_synchronous_run_has_the_numbers_seeds_and_order_that_follow_from_its_position():
    """A change of the seeds changes what every seeded run samples."""
    config = config_of("run.seed=3")
    found = stream(config, random_lengths(0))
    assert [list(groups) for groups in found.taken] == [list(range(4 * step, 4 * step + 4)) for step in range(6)]
    assert [[group.group_id for group in groups.values()] for groups in found.taken] == [
        [GroupId(position) for position in range(4 * step, 4 * step + 4)] for step in range(6)
    ]
    for request in found.requests:
        sampling = Sampling.to_train(config)
        assert request.seed == sampling.seed_of(request.group_id.number, request.index)
    assert len({request.seed for request in found.requests}) == len(found.requests)
    assert {age for step in range(1, 7) for age in found.ages(step)} == {0}


def test_the_learner_takes_what_has_finished_first_and_does_not_wait_for_a_long_answer():
    """Engines have work for less than one step at a time, so what waits for them leaves room."""
    found = stream(config_of("run.max_age=2"), one_long(0, 150), slots=3, num_engines=1, learner_s=0.1)
    assert 0 not in found.taken[0] and len(found.taken[0]) == 4
    assert found.positions() == list(range(24))


def test_a_group_that_would_be_too_old_is_waited_for():
    found = stream(config_of("run.max_age=2"), one_long(0), slots=3, num_engines=1, learner_s=0.1)
    (step,) = [number for number, groups in enumerate(found.taken, start=1) if 0 in groups]
    assert step == 3 and max(found.ages(3)) == 2
    assert max(found.waited_s) == found.waited_s[2] > 4.0


@pytest.mark.parametrize("max_age", [0, 1, 3])
def test_no_more_groups_are_opened_than_the_age_allows(max_age):
    found = stream(config_of(f"run.max_age={max_age}"), random_lengths(1))
    assert found.in_flight[0] == (4 * (max_age + 1), 4 * (max_age + 1))
    for step, (opened, untaken) in enumerate(found.in_flight, start=1):
        assert opened == 4 * min(step + max_age, 6) and untaken == opened - 4 * (step - 1)


@pytest.mark.parametrize("too_old", ["wait", "abort"])
@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_nothing_is_too_old_lost_or_taken_twice(seed, too_old):
    """Random sizes and speeds; an engine is lost, and groups are dropped, in some runs. A deadlock would be an error of
    the virtual clock."""
    rng = np.random.default_rng(seed)
    max_age = int(rng.integers(1, 4))
    drops = sorted(rng.uniform(0, 20, 5 * (seed % 3 == 0)).tolist())
    found = stream(
        config_of("run.steps=15", f"run.max_age={max_age}", f"run.too_old={too_old}"),
        random_lengths(seed),
        slots=int(rng.integers(1, 20)),
        learner_s=float(rng.uniform(0, 2)),
        engine=DeafEngine if seed % 2 else SimulatedEngine,
        lose_at_s=3.0 if seed % 4 == 1 else None,
        drop_at_s=drops,
    )
    positions = found.positions()
    assert len(positions) == len(set(positions)) == 60 - found.num_dropped
    assert max(max(found.ages(step), default=0) for step in range(1, 16)) <= max_age
    for groups in found.taken:
        for position, group in groups.items():
            assert group.group_id.number == position
            assert [rollout.id for rollout in group.rollouts] == [
                RolloutId(group.group_id, index) for index in range(2)
            ]


def test_nobody_waits_for_what_is_aborted_and_its_late_answers_are_not_taken():
    """The first try of group 0 is long and finishes in the end, on an engine that did not hear; the second is short."""
    settings = ("run.max_age=1", "run.too_old=abort")
    for engine in (SimulatedEngine, DeafEngine):
        found = stream(config_of(*settings), one_long(0, 200), num_engines=1, slots=16, engine=engine)
        assert found.positions() == list(range(24))
        (group,) = [groups[0] for groups in found.taken if 0 in groups]
        assert group.group_id == GroupId(0, attempt=1) and all(
            len(rollout.token_ids) == 10 for rollout in group.rollouts
        )
        assert max(found.waited_s) < 0.5
        assert found.num_refused == (2 if engine is DeafEngine else 0)


def test_an_aborted_rollout_that_was_not_submitted_never_is():
    """An abort must not overtake the request that it is about."""
    submitted: list[RolloutId] = []
    aborted: list[RolloutId] = []

    class Slow(SimulatedEngine):
        async def submit(self, requests: Sequence[RolloutRequest]) -> None:
            await asyncio.sleep(0.05)
            submitted.extend(request.id for request in requests)
            await super().submit(requests)

        async def abort(self, ids: Sequence[RolloutId]) -> None:
            assert set(ids) <= set(submitted), "aborted before it was submitted"
            finished = {rollout.id for rollout in self._finished}  # the engine may still deliver these
            aborted.extend(one for one in ids if one not in finished)
            await super().abort(ids)

        async def collect(self) -> Sequence[Rollout]:
            rollouts = await super().collect()
            assert not {rollout.id for rollout in rollouts} & set(aborted)
            return rollouts

    config = config_of("run.max_age=1", "run.too_old=abort", "run.steps=20")
    found = stream(config, random_lengths(5, median=10), num_engines=2, slots=8, engine=Slow, learner_s=0.02)
    assert found.positions() == list(range(80)) and aborted


def test_an_engine_counts_as_idle_only_when_it_has_aborted_what_it_should():
    """Otherwise its device would be leased, and the engine told to sleep, with requests in flight."""
    engines: dict[str, SimulatedEngine] = {}
    drained: list[str] = []

    class Slow(SimulatedEngine):
        async def submit(self, requests: Sequence[RolloutRequest]) -> None:
            engines[self.name] = self
            await super().submit(requests)

        async def abort(self, ids: Sequence[RolloutId]) -> None:
            await asyncio.sleep(2.0)
            await super().abort(ids)

    class Watching(OnlineDrafter):
        def on_drained(self, engine: str) -> None:
            assert not engines[engine]._running and not engines[engine]._waiting
            drained.append(engine)

    config = config_of("run.max_age=1", "run.too_old=abort", "run.steps=20")
    lengths = random_lengths(5, median=10)
    found = stream(config, lengths, num_engines=8, slots=2, engine=Slow, learner_s=0.02, lessor=Watching())
    assert found.positions() == list(range(80)) and drained


def test_aborting_trains_on_shorter_answers_than_the_policy_gives_and_waiting_does_not():
    """The bias that docs/config.md and docs/limits.md state, so that nobody turns the setting for speed alone."""
    shares: dict[str, list[float]] = {"wait": [], "abort": []}
    for too_old, found_shares in shares.items():
        for seed in range(5):
            lengths = random_lengths(seed, sigma=0.8)
            config = config_of("run.steps=40", "run.max_age=1", f"run.too_old={too_old}", "rollout.prompts_per_step=16")
            found = stream(config, lengths, num_engines=2, slots=32, learner_s=0.3)
            trained = [
                len(rollout.token_ids)
                for groups in found.taken
                for group in groups.values()
                for rollout in group.rollouts
            ]
            drawn = [lengths(request) for request in found.requests]
            found_shares.append(float(np.mean(trained) / np.mean(drawn)))
    print({too_old: (round(min(found), 3), round(max(found), 3)) for too_old, found in shares.items()})
    assert all(share == pytest.approx(1.0) for share in shares["wait"])
    assert max(shares["abort"]) < 0.95


class Remembering(Recovery):
    """What an earlier driver has logged: some steps, and the groups that they took."""

    def __init__(self, config: Config, taken: dict[int, list[int]]) -> None:
        super().__init__(None, config)
        self.taken = {step: Taken(groups=groups, dropped=[], rewards=[]) for step, groups in taken.items()}
        self._versions = {position: step - 1 for step, groups in taken.items() for position in groups}

    def logged(self, position: int, prompt: Prompt) -> Group | None:
        if position not in self._versions:
            return None
        requests = [
            RolloutRequest(
                group_id=GroupId(position), index=i, prompt_ids=prompt.token_ids, max_tokens=9, temperature=1.0
            )
            for i in range(2)
        ]
        version = self._versions[position]
        rollouts = [
            finished_rollout(request, 5, engine="e", started_s=0.0, version=version, version_end=version)
            for request in requests
        ]
        return Group(group_id=GroupId(position), prompt=prompt, rollouts=tuple(rollouts))


def test_what_was_in_flight_is_not_begun_before_the_steps_that_come_again_are_through():
    """Groups 8 to 11 waited for an engine while three steps were made. Begun with the first of them, they would be of
    age 3 when the fourth takes them."""
    config = config_of("run.max_age=2")
    taken = {1: [0, 1, 2, 3], 2: [4, 5, 6, 7], 3: [12, 13, 14, 15]}
    found = stream(config, one_long(-1), recovery=Remembering(config, taken))
    assert [list(groups) for groups in found.taken[:3]] == list(taken.values())
    assert found.positions() == list(range(24))
    assert max(max(found.ages(step)) for step in range(1, 7)) <= 2
    assert {request.group_id.number for request in found.requests} == {8, 9, 10, 11, *range(16, 24)}
