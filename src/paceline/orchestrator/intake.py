"""Which groups are in flight, and which of them the learner takes next.

    prompts ──open──▶ fleet ──on_group──▶ ready ──take──▶ learner
               │                            │
      at step s at most (s + max_age) n     the oldest n that have finished, unless a group that is still
      groups have been opened in all        sampled would be too old for every step after this one

n is `rollout.prompts_per_step`. The age of a group is the number of policy versions since its oldest token. It counts
from the moment an engine gets its first rollout; a group that waits for an engine does not grow older. Every step takes
n groups and nothing older than `max_age`, so after a step

    at most (max_age - a) n of the groups left may have the age a or more,        for a = 1 .. max_age,

because just so many can still be taken in time. Where more have it, some of them are due: the learner waits for them
(`run.too_old = "wait"`), or they are aborted and opened again, as another attempt ("abort"). With
max_age 0 all groups of a step are due, and this is synchronous training.

If engines begin all that is opened at once, the rule leaves no choice, and groups are taken in the order in which they
were opened. What waits for an engine makes room for the learner to take what has finished first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from paceline.config import Config
from paceline.metrics import Sum
from paceline.orchestrator.fleet import Fleet
from paceline.orchestrator.groups import Sampling
from paceline.orchestrator.journal import Journal
from paceline.orchestrator.prompt_stream import PromptStream
from paceline.orchestrator.recovery import Recovery
from paceline.orchestrator.rewards import Scoring
from paceline.types import Group, GroupId, Prompt


@dataclass(slots=True, kw_only=True)
class _Untaken:
    """A group that no step has taken."""

    prompt: Prompt
    group_id: GroupId
    began: int | None = None
    """Policy version of its oldest token, or the oldest that it can have; None until an engine has some of it."""
    group: Group | None = None
    """Once it has finished."""


class Intake:
    """A group is known by its position among the prompts. Implements `groups.GroupListener`."""

    def __init__(
        self,
        prompts: Iterator[Prompt],
        config: Config,
        fleet: Fleet,
        recovery: Recovery,
        journal: Journal,
        scoring: Scoring,
    ) -> None:
        self._config, self._fleet, self._recovery, self._journal = config, fleet, recovery, journal
        self._scoring = scoring
        self._size, self._max_age = config.rollout.prompts_per_step, config.run.max_age
        self._waits = config.run.too_old == "wait"
        self.prompts = PromptStream(prompts)
        self.dropped: list[int] = []
        """Groups that the last step found dropped."""
        self._newly_dropped: list[int] = []
        self._open: dict[int, _Untaken] = {}
        self._held: list[int] = []
        """Open groups that are not sampled yet."""
        self._num_ready = 0
        self._version = 0
        self._news = asyncio.Event()
        self._failure: BaseException | None = None

    def state(self) -> dict[str, Any]:
        """What a later run needs to go on after a step."""
        return {**self.prompts.state(), "open": sorted(self._open)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from there: what was open then is open again."""
        for position, prompt in self.prompts.restore(state, set(state["open"])).items():
            self._admit(position, prompt)

    def on_version(self, version: int) -> None:
        """Engines have this policy version now."""
        for opened in self._open.values():
            if opened.began is None and self._fleet.ledger.has_begun(opened.group_id):
                opened.began = self._version
        self._version = version

    def open(self, step: int) -> None:
        """Open what may be in flight during this step, nothing beyond the last.

        While steps come again, only what they take is sampled: the rest would be begun too early, and so be too old
        for the first new step.
        """
        last = min(step + self._max_age, self._config.run.steps) * self._size
        for position in range(self.prompts.num_taken, last):
            self._admit(position, self.prompts.take())
        wanted = self._held
        if step in self._recovery.taken:
            needed = {position for taken in self._recovery.taken.values() for position in taken.groups}
            wanted = [position for position in self._held if position in needed]
        self._held = sorted(set(self._held).difference(wanted))
        for portion, positions in groupby(wanted, lambda position: position // self._size):
            sampling = Sampling.to_train(self._config, 0, portion + 1)
            self._sample(list(positions), sampling)

    async def take(self, step: int) -> dict[int, Group]:
        """Wait for what this step trains on; returns it in the order of the prompts. A step that comes again takes what
        it took before."""
        while True:
            if self._failure is not None:
                raise self._failure
            chosen = self._again(step) if step in self._recovery.taken else self._choose(step)
            if chosen is not None:
                break
            self._news.clear()
            await self._news.wait()
        taken = {position: self._open.pop(position).group for position in sorted(chosen)}
        self._num_ready -= len(taken)
        self.dropped, self._newly_dropped = self._newly_dropped, []
        if not self._waits:
            self._abort_due()
        return {position: group for position, group in taken.items() if group is not None}

    def on_group(self, group: Group) -> None:
        position = group.group_id.number
        self._finish(position, group, None)
        self._recovery.keep(position, group)
        self._news.set()

    def on_dropped(self, group_id: GroupId) -> None:
        position = group_id.number
        del self._open[position]
        self._newly_dropped.append(position)
        self._news.set()

    def on_failure(self, failure: BaseException) -> None:
        self._failure = failure
        self._news.set()

    def _admit(self, position: int, prompt: Prompt) -> None:
        """Open a group, unless it was dropped in a step that comes again."""
        if any(position in taken.dropped for taken in self._recovery.taken.values()):
            return
        self._open[position] = _Untaken(prompt=prompt, group_id=GroupId(position))
        if (group := self._recovery.logged(position, prompt)) is not None:
            self._finish(position, group, self._recovery.logged_rewards(position))
        else:
            self._held.append(position)

    def _sample(self, positions: Sequence[int], sampling: Sampling) -> None:
        opened = [self._open[position] for position in positions]
        self._fleet.open(
            [group.prompt for group in opened],
            sampling,
            group_ids=[group.group_id for group in opened],
            places=[position % self._size for position in positions],
            listener=self,
        )

    def _finish(self, position: int, group: Group, rewards: list[float] | None) -> None:
        self._scoring.begin(position, group, rewards)
        opened = self._open.pop(position)
        opened.group, opened.began = group, group.policy_version
        self._open[position] = opened  # at the end: what has finished is in the order in which it did
        self._num_ready += 1

    def _age(self, position: int) -> int:
        began = self._open[position].began
        return 0 if began is None else self._version - began

    def _choose(self, step: int) -> list[int] | None:
        """The oldest groups that have finished, of equal age the first to finish; None while that leaves one behind
        that would be too old."""
        num = len(self._open) - (self.prompts.num_taken - step * self._size)
        if self._num_ready < num:
            return None
        ready = [position for position, opened in self._open.items() if opened.group is not None]
        ready.sort(key=lambda position: -self._age(position))
        due = {age: self._num_due(age, self._open if self._waits else ready) for age in range(1, self._max_age + 1)}
        num = max(num, 0, *due.values())  # more than usual if younger ones were dropped
        for age, least in due.items():
            if sum(self._age(position) >= age for position in ready[:num]) < least:
                return None
        return ready[:num]

    def _num_due(self, age: int, positions: Iterable[int]) -> int:
        """How many of these groups must be gone after this step, because all of this age or more could not be taken in
        time later."""
        num_older = sum(self._age(position) >= age for position in positions)
        return max(0, num_older - (self._max_age - age) * self._size)

    def _again(self, step: int) -> list[int] | None:
        """What the step took before; None while something of it has to be sampled again."""
        wanted = [position for position in self._recovery.taken[step].groups if position in self._open]
        return wanted if all(self._open[position].group is not None for position in wanted) else None

    def _abort_due(self) -> None:
        """Open groups again that could not be taken in time, the oldest of them first."""
        unfinished = [position for position, opened in self._open.items() if opened.group is None]
        unfinished.sort(key=lambda position: -self._age(position))
        for age in range(self._max_age, 0, -1):
            older = [position for position in unfinished if position in self._open and self._age(position) >= age]
            for position in older[: self._num_due(age, self._open)]:
                self._try_again(position)

    def _try_again(self, position: int) -> None:
        opened = self._open[position]
        self._fleet.abort(opened.group_id)
        self._journal.metrics.add("rollout/aborted_groups", Sum(1))
        # Late rollouts of the aborted attempt have another id, so they are not accepted.
        opened.group_id, opened.began = GroupId(position, attempt=opened.group_id.attempt + 1), None
        sampling = Sampling.to_train(self._config, 2, opened.group_id.attempt, position // self._size + 1)
        self._sample([position], sampling)
