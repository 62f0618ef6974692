"""Rewards as groups finish, from a user's function in processes or a workload's in a thread, and training samples.

    def reward(prompt: str, completion: str) -> float: ...
    def reward(prompt: str, completion: str, row: dict) -> float: ...   # with the dataset row, for the answer

    async with open_scorer(reward, tokenizer, recorder) as score:
        rewards = await score(groups)

A failed reward is NaN, and its group is left out of the update.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from paceline.config import ObjectiveConfig
from paceline.learner.objective import advantages, is_trained_on
from paceline.metrics import Mean, Recorder
from paceline.orchestrator.journal import Journal, Rewards
from paceline.orchestrator.reward_pool import RewardPool, UserReward
from paceline.types import Group, PacelineError, Sample, Tokenizer

Row = Mapping[str, Any]
Reward = Callable[[str, str, Row], float]
Score = Callable[[Sequence[Group]], Coroutine[Any, Any, Rewards]]
"""Return a reward for every rollout of every group."""


class Scoring:
    """Rewards of finished groups, computed while others are still sampled. Use as an async context manager."""

    def __init__(self, score: Score) -> None:
        self._score = score
        self._rewards: dict[int, asyncio.Task[list[float]]] = {}

    async def __aenter__(self) -> Scoring:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._rewards.values():
            task.cancel()
        await asyncio.gather(*self._rewards.values(), return_exceptions=True)

    def begin(self, position: int, group: Group, known: list[float] | None) -> None:
        """Start scoring the group at this position of the prompts, unless its rewards are known."""
        self._rewards[position] = asyncio.create_task(self._one(group, known))

    async def take(self, positions: Collection[int]) -> list[list[float]]:
        """Wait for the rewards of these groups and forget them."""
        rewards = await asyncio.gather(*(self._rewards[position] for position in positions))
        for position in positions:
            del self._rewards[position]
        return rewards

    async def _one(self, group: Group, known: list[float] | None) -> list[float]:
        return (await self._score([group]))[0] if known is None else known


@asynccontextmanager
async def open_scorer(reward: Reward | UserReward, tokenizer: Tokenizer, recorder: Recorder) -> AsyncGenerator[Score]:
    """Yield a function that scores groups; the reward processes end with the block."""
    if not isinstance(reward, UserReward):
        yield scorer(reward, tokenizer)
        return
    pool = RewardPool(reward, recorder)

    async def score(groups: Sequence[Group]) -> list[list[float]]:
        completions = await asyncio.to_thread(_completions, groups, tokenizer)
        return await pool.score([group.prompt for group in groups], completions)

    try:
        yield score
    finally:
        await pool.close()


def scorer(reward: Reward, tokenizer: Tokenizer) -> Score:
    """Return a function that scores groups in a thread, one call after the other."""
    turn = asyncio.Lock()

    def score_all(groups: Sequence[Group]) -> list[list[float]]:
        return [
            [_finite(reward(group.prompt.text, completion, group.prompt.row), group) for completion in completions]
            for group, completions in zip(groups, _completions(groups, tokenizer), strict=True)
        ]

    async def score(groups: Sequence[Group]) -> list[list[float]]:
        async with turn:
            return await asyncio.to_thread(score_all, groups)

    return score


def make_samples(
    groups: Sequence[Group], rewards: Rewards, objective: ObjectiveConfig, journal: Journal
) -> list[Sample]:
    """Return rollouts with their advantages, without groups that have equal rewards or a failed one."""
    samples: list[Sample] = []
    for group, group_rewards in zip(groups, rewards, strict=True):
        keep = is_trained_on(group_rewards, objective)
        journal.metrics.add("policy/groups_kept_share", Mean(float(keep)))
        if keep:
            group_advantages = advantages(group_rewards, objective.advantage)
            samples += [Sample.of(r, float(a)) for r, a in zip(group.rollouts, group_advantages, strict=True)]
    return samples


def _completions(groups: Sequence[Group], tokenizer: Tokenizer) -> list[list[str]]:
    return [[tokenizer.decode(rollout.token_ids.tolist(), True) for rollout in group.rollouts] for group in groups]


def _finite(reward: float, group: Group) -> float:
    if not math.isfinite(reward):
        raise PacelineError(f"the reward of prompt {group.prompt.id!r} is {reward}; it must be a finite number")
    return float(reward)
