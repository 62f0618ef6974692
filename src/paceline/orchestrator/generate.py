"""Generate rollouts without a fleet: all at once, or a few at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from itertools import islice

from paceline.types import Engine, Rollout, RolloutRequest


async def generate_all(engine: Engine, requests: Sequence[RolloutRequest]) -> list[Rollout]:
    """Submit all requests at once; return the rollouts in the order of their ids."""
    await engine.submit(requests)
    rollouts: list[Rollout] = []
    while len(rollouts) < len(requests):
        rollouts += await engine.collect()
    return sorted(rollouts, key=lambda rollout: rollout.id)


async def generate_on_all(engines: Sequence[Engine], requests: Sequence[RolloutRequest]) -> list[Rollout]:
    """Distribute requests over engines; return the rollouts in the order of their ids."""
    shares = [requests[index :: len(engines)] for index in range(len(engines))]
    parts = await asyncio.gather(*map(generate_all, engines, shares))
    return sorted((rollout for part in parts for rollout in part), key=lambda rollout: rollout.id)


async def generate_until(
    engine: Engine, requests: Iterator[RolloutRequest], *, min_tokens: int, max_in_flight: int
) -> list[Rollout]:
    """Keep `max_in_flight` requests running until the finished rollouts have `min_tokens` tokens, then let the others
    finish: aborting them would drop the long ones. Return the rollouts in the order of their ids."""
    rollouts: list[Rollout] = []
    num_submitted = num_tokens = 0
    while True:
        if num_tokens < min_tokens:
            fresh = list(islice(requests, max_in_flight - (num_submitted - len(rollouts))))
            if fresh:
                await engine.submit(fresh)
                num_submitted += len(fresh)
        if len(rollouts) == num_submitted:
            return sorted(rollouts, key=lambda rollout: rollout.id)
        finished = await engine.collect()
        rollouts += finished
        num_tokens += sum(len(rollout.token_ids) for rollout in finished)
