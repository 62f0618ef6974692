"""Open groups ahead of the learner, and choose the groups of each step.

    prompts ──open──▶ fleet ──on_group──▶ ready ──take──▶ learner
               │                            │
      by step s, at most (s + max_age) n    the oldest n finished groups, unless an unfinished group would
      groups have been opened               be too old for every later step

n is `rollout.prompts_per_step`. The age of a group is the number of policy versions since its oldest token. A group
without tokens does not age. Every step takes n groups, none older than `max_age`, so after a step

    at most (max_age - a) n of the remaining groups may have age a or more,        for a = 1 .. max_age,

because later steps can take only so many in time. The excess is due: the learner waits for it (`run.too_old = "wait"`),
or it is aborted and sampled again as another attempt ("abort"). With max_age 0 all groups of a step are due, which is
synchronous training.

If engines begin all open groups at once, groups are taken in the order in which they were opened. Groups that wait for
an engine let the learner take finished groups first.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from paceline.config import Config
from paceline.files import sha256_of
from paceline.metrics import Sum
from paceline.orchestrator.fleet import Fleet
from paceline.orchestrator.groups import Sampling
from paceline.orchestrator.journal import Journal
from paceline.orchestrator.recovery import Recovery
from paceline.orchestrator.rewards import Scoring
from paceline.types import Group, GroupId, Prompt


class PromptStream:
    """Infinite iterator of training prompts with a position to resume from.

    Prompts depend only on the data and its seed, so a position is a count. A checksum of all prompts up to it detects
    changed data.
    """

    def __init__(self, prompts: Iterator[Prompt]) -> None:
        self._prompts = prompts
        self._ahead: deque[Prompt] = deque()
        self._sha256 = ""
        """Chained checksum of all prompts taken."""
        self.num_taken = 0

    def peek(self, num: int) -> list[Prompt]:
        while len(self._ahead) < num:
            self._ahead.append(next(self._prompts))
        return list(self._ahead)[:num]

    def take(self) -> Prompt:
        self.peek(1)
        prompt = self._ahead.popleft()
        named = f"{prompt.id}\0".encode() + prompt.token_ids.tobytes()
        self._sha256 = sha256_of([self._sha256.encode(), named])
        self.num_taken += 1
        return prompt

    def state(self) -> dict[str, Any]:
        return {"num_taken": self.num_taken, "sha256": self._sha256}

    def restore(self, state: Mapping[str, Any], again: Collection[int] = ()) -> dict[int, Prompt]:
        """Advance to a position; return the prompts at the positions `again` before it. Raise ValueError if the data
        has changed."""
        found: dict[int, Prompt] = {}
        while self.num_taken < state["num_taken"]:
            position, prompt = self.num_taken, self.take()
            if position in again:
                found[position] = prompt
        if self._sha256 != state["sha256"]:
            raise ValueError(
                f"data: the first {state['num_taken']} prompts differ from those that this run trained on; must be the "
                "data that it began with because rollouts are logged by position"
            )
        return found


@dataclass(slots=True, kw_only=True)
class _Untaken:
    """A group that no step has taken yet."""

    prompt: Prompt
    group_id: GroupId
    began: int | None = None
    """Policy version of its oldest possible token; None until an engine receives a rollout."""
    group: Group | None = None


class Intake:
    """A `groups.GroupListener`. Groups are addressed by their position among the prompts."""

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
        """Groups dropped before the last step."""
        self._newly_dropped: list[int] = []
        self._open: dict[int, _Untaken] = {}
        self._held: list[int] = []
        """Open groups that no engine may begin yet."""
        self._num_ready = 0
        self._version = 0
        self._news = asyncio.Event()
        self._failure: BaseException | None = None

    def state(self) -> dict[str, Any]:
        """Return the state after a step, for checkpoints."""
        return {**self.prompts.state(), "open": sorted(self._open)}

    def restore(self, state: Mapping[str, Any]) -> None:
        for position, prompt in self.prompts.restore(state, set(state["open"])).items():
            self._admit(position, prompt)

    def on_version(self, version: int) -> None:
        for opened in self._open.values():
            if opened.began is None and self._fleet.ledger.has_begun(opened.group_id):
                opened.began = self._version
        self._version = version

    def open(self, step: int) -> None:
        """Open the groups that may be in flight during this step.

        While steps repeat after a resume, only their groups are sampled: others would be too old for the first new
        step.
        """
        last = min(step + self._max_age, self._config.run.steps) * self._size
        for position in range(self.prompts.num_taken, last):
            self._admit(position, self.prompts.take())
        wanted = self._held
        if step in self._recovery.taken:
            needed = {position for taken in self._recovery.taken.values() for position in taken.groups}
            wanted = [position for position in self._held if position in needed]
        self._held = sorted(set(self._held).difference(wanted))
        for _, positions in groupby(wanted, lambda position: position // self._size):
            self._sample(list(positions), Sampling.to_train(self._config))

    async def take(self, step: int) -> dict[int, Group]:
        """Wait for the step's groups and return them in the order of the prompts. A repeated step takes the same groups
        as before."""
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
        """Open a group, unless a repeated step drops it."""
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
            places=positions,
            listener=self,
        )

    def _finish(self, position: int, group: Group, rewards: list[float] | None) -> None:
        self._scoring.begin(position, group, rewards)
        opened = self._open.pop(position)
        opened.group, opened.began = group, group.policy_version
        self._open[position] = opened  # at the end, in order of completion
        self._num_ready += 1

    def _age(self, position: int) -> int:
        began = self._open[position].began
        return 0 if began is None else self._version - began

    def _choose(self, step: int) -> list[int] | None:
        """Return the oldest finished groups, in order of completion; None while a remaining group would be too old."""
        num = len(self._open) - (self.prompts.num_taken - step * self._size)
        if self._num_ready < num:
            return None
        ready = [position for position, opened in self._open.items() if opened.group is not None]
        ready.sort(key=lambda position: -self._age(position))
        due = {age: self._num_due(age, self._open if self._waits else ready) for age in range(1, self._max_age + 1)}
        num = max(num, 0, *due.values())  # larger if younger groups were dropped
        for age, least in due.items():
            if sum(self._age(position) >= age for position in ready[:num]) < least:
                return None
        return ready[:num]

    def _num_due(self, age: int, positions: Iterable[int]) -> int:
        """Return how many of these groups this step must take, because later steps cannot take all groups of this age
        in time."""
        num_older = sum(self._age(position) >= age for position in positions)
        return max(0, num_older - (self._max_age - age) * self._size)

    def _again(self, step: int) -> list[int] | None:
        """Return the groups that the step took before; None while some are being sampled again."""
        wanted = [position for position in self._recovery.taken[step].groups if position in self._open]
        return wanted if all(self._open[position].group is not None for position in wanted) else None

    def _abort_due(self) -> None:
        """Restart groups that cannot be taken in time, the oldest first."""
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
        self._sample([position], Sampling.to_train(self._config, attempt=opened.group_id.attempt))
