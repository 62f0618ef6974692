"""Sampling parameters of groups, batches, and notification as each group finishes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

from paceline.config import Config
from paceline.files import sha256_of
from paceline.types import Group, GroupId


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    group_size: int
    temperature: float
    max_tokens: int
    seed: tuple[int, ...] = ()
    """Seeds every rollout, together with its prompt's place."""

    @classmethod
    def to_train(cls, config: Config, *, attempt: int = 0) -> Sampling:
        """Return the sampling of training prompts, whose places are their positions among the prompts."""
        rollout = config.rollout
        return cls(
            group_size=rollout.group_size,
            temperature=rollout.temperature,
            max_tokens=rollout.max_tokens,
            seed=(config.run.seed, 0, attempt),
        )

    def seed_of(self, place: int, index: int) -> int:
        """Return the seed of a rollout. A hash takes a tenth of the time of numpy's seed sequences."""
        return int(sha256_of([repr((*self.seed, place, index)).encode()])[:16], 16) >> 1


class GroupListener(Protocol):
    """Is notified of the end of each group."""

    def on_group(self, group: Group) -> None:
        """Handle a finished group."""

    def on_dropped(self, group_id: GroupId) -> None:
        """Handle a dropped group."""

    def on_failure(self, failure: BaseException) -> None:
        """Handle the failure of all open groups."""


@dataclass(slots=True, kw_only=True)
class Batch:
    """Groups that were opened together."""

    total: int
    group_ids: tuple[GroupId, ...]
    listener: GroupListener | None = None
    groups: dict[GroupId, Group] = field(default_factory=dict[GroupId, Group])
    done: int = 0
    num_tokens: int = 0
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    failure: BaseException | None = None

    async def wait(self) -> list[Group]:
        """Return the finished groups in the order of their prompts."""
        await self.finished.wait()
        if self.failure is not None:
            raise self.failure
        return [self.groups[group_id] for group_id in self.group_ids if group_id in self.groups]
