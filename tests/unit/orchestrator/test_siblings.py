"""Siblings together: what keeping a group on one engine saves, on a simulated fleet that reads prompts.

`pytest -s tests/unit/orchestrator/test_siblings.py` shows the figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import islice

import pytest

from benchmarks.simulated import SimulatedEngine, long_tailed_lengths
from paceline.orchestrator.fleet import Fleet
from paceline.orchestrator.groups import Sampling
from paceline.orchestrator.ledger import Ledger
from paceline.orchestrator.members import Members
from paceline.orchestrator.online_drafter import OnlineDrafter
from paceline.plan.simulate import run_virtual, simulated_prompts
from paceline.types import GroupId, RolloutRequest

NUM_ENGINES, NUM_PROMPTS, GROUP_SIZE = 64, 512, 16
MAX_NUM_SEQS = 64
READING = 100
"""A prompt of 2,000 tokens takes as long as 100 decoded ones: prefill computes some twenty tokens while a decode step
reads the weights once."""


def generate(length_of: Callable[[RolloutRequest], int]) -> tuple[float, float]:
    """Prompts read per prompt, and seconds of the batch. An engine pays for a prompt that it has not read before."""
    read: list[set[GroupId]] = [set() for _ in range(NUM_ENGINES)]

    def on(engine: int) -> Callable[[RolloutRequest], int]:
        def seconds(request: RolloutRequest) -> int:
            is_new = request.group_id not in read[engine]
            read[engine].add(request.group_id)
            return length_of(request) + READING * is_new

        return seconds

    engines = [
        SimulatedEngine(name=f"engine-{i}", length_of=on(i), max_num_seqs=MAX_NUM_SEQS, seconds_per_token=1.0)
        for i in range(NUM_ENGINES)
    ]

    async def work() -> None:
        in_flight = MAX_NUM_SEQS * 9 // 8 + 1
        async with Fleet(Members(engines), OnlineDrafter(), max_in_flight=in_flight, on_lost=lambda *_: None) as fleet:
            sampling = Sampling(group_size=GROUP_SIZE, temperature=1.0, max_tokens=4096)
            batch = fleet.open(list(islice(simulated_prompts(2000), NUM_PROMPTS)), sampling)
            assert len(await batch.wait()) == NUM_PROMPTS

    _, makespan_s = run_virtual(work)
    return sum(map(len, read)) / NUM_PROMPTS, makespan_s


def correlated(seed: int) -> Callable[[RolloutRequest], int]:
    """Lengths that a group has in common up to a factor, as hard problems have long answers: the worst case for
    siblings on one engine."""
    own, common = long_tailed_lengths(seed, sigma=0.3), long_tailed_lengths(seed + 1, median=300, maximum=2048)
    return lambda request: own(request) * common(replace(request, index=0)) // 70


@pytest.mark.parametrize("lengths", [long_tailed_lengths(3), correlated(3)], ids=["independent", "correlated"])
def test_a_prompt_is_read_about_once_and_the_batch_ends_no_later(
    lengths: Callable[[RolloutRequest], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dealt out in turn, siblings are read as often as there are of them; kept together at any price, they would leave
    engines without work."""
    together, together_s = generate(lengths)
    with monkeypatch.context() as patched:
        patched.setattr(Ledger, "_next_for", lambda ledger, engine, _: ledger._first(ledger._free, is_taken=False))
        dealt_out, dealt_out_s = generate(lengths)
    print(
        f"prompts read per prompt: {together:.2f} together, {dealt_out:.2f} dealt out; "
        f"makespan {dealt_out_s / together_s:.3f} times shorter"
    )
    assert dealt_out > 0.9 * GROUP_SIZE
    assert together < 1.6
    assert together_s <= 1.02 * dealt_out_s


def test_a_batch_that_fits_at_once_is_dealt_out():
    """Siblings together, 128 rollouts on two engines: one had 1.21 times the mean of tokens; dealt out 1.03."""
    engines = [
        SimulatedEngine(name=f"engine-{i}", length_of=long_tailed_lengths(0), max_num_seqs=64, seconds_per_token=1.0)
        for i in range(2)
    ]

    async def work() -> list[Counter[str]]:
        async with Fleet(Members(engines), OnlineDrafter(), max_in_flight=64, on_lost=lambda *_: None) as fleet:
            sampling = Sampling(group_size=8, temperature=1.0, max_tokens=640)
            groups = await fleet.open(list(islice(simulated_prompts(), 16)), sampling).wait()
            return [Counter(rollout.engine for rollout in group.rollouts) for group in groups]

    groups, _ = run_virtual(work)
    assert groups == [{"engine-0": 4, "engine-1": 4}] * 16
