"""Requests in, rollouts out: each exactly once, in the order of their keys, and none that was begun is dropped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

import numpy as np

from benchmarks.simulated import SimulatedEngine
from paceline.orchestrator.generate import generate_all, generate_on_all, generate_until
from paceline.plan.simulate import run_virtual
from paceline.types import GroupId, Rollout, RolloutRequest


def requests(*numbers: int) -> list[RolloutRequest]:
    prompt_ids = np.zeros(4, np.int32)
    return [
        RolloutRequest(group_id=GroupId(n), index=0, prompt_ids=prompt_ids, max_tokens=100, temperature=1.0)
        for n in numbers
    ]


def endless() -> Iterator[RolloutRequest]:
    return (requests(number)[0] for number in count())


class RecordingEngine(SimulatedEngine):
    submitted: list[int]
    most_in_flight: int

    async def submit(self, requests: Sequence[RolloutRequest]) -> None:
        self.submitted += [request.group_id.number for request in requests]
        await super().submit(requests)
        self.most_in_flight = max(self.most_in_flight, len(self._running) + len(self._waiting))


def make_engine(name: str = "engine") -> RecordingEngine:
    engine = RecordingEngine(
        name=name, length_of=lambda r: 10 - r.group_id.number % 10, max_num_seqs=3, seconds_per_token=0.01
    )
    engine.submitted, engine.most_in_flight = [], 0
    return engine


def keys(rollouts: Sequence[Rollout]) -> list[int]:
    return [rollout.group_id.number for rollout in rollouts]


def test_all_come_in_the_order_of_their_keys() -> None:
    found, _ = run_virtual(lambda: generate_all(make_engine(), requests(4, 2, 0, 3, 1)))
    assert keys(found) == [0, 1, 2, 3, 4]


def test_several_engines_take_turns_and_one_may_have_nothing_to_do() -> None:
    async def work() -> tuple[list[Rollout], list[list[int]]]:
        engines = [make_engine(f"e{i}") for i in range(3)]
        found = await generate_on_all(engines, requests(0, 1))
        return found, [engine.submitted for engine in engines]

    (found, submitted), _ = run_virtual(work)
    assert keys(found) == [0, 1]
    assert submitted == [[0], [1], []]


def test_a_few_are_kept_in_flight_until_there_are_enough_tokens_and_all_that_began_are_finished() -> None:
    async def work() -> tuple[list[Rollout], RecordingEngine]:
        engine = make_engine()
        return await generate_until(engine, endless(), min_tokens=60, max_in_flight=4), engine

    (found, engine), _ = run_virtual(work)
    assert keys(found) == engine.submitted == list(range(len(found)))
    assert engine.most_in_flight == 4
    tokens = [len(rollout.token_ids) for rollout in found]
    assert sum(tokens) >= 60 > sum(tokens[:-4]), "it went on after there were enough"


def test_requests_that_run_out_end_it() -> None:
    found, _ = run_virtual(
        lambda: generate_until(make_engine(), iter(requests(0, 1)), min_tokens=1000, max_in_flight=4)
    )
    assert keys(found) == [0, 1]
