"""Which rollout of which group is where: every rollout is counted exactly once, whatever dies in between.

A rollout is pending, assigned to one engine, or done. An engine that is lost
gives its unfinished rollouts back to the queue; what it delivers afterwards is not taken (it may have been sampled
from a half-written policy, and its rollouts are assigned elsewhere by then). Pure logic: no clock, no I/O, no engine.

Siblings share a prompt, and the engine that has read it for one has it for the others. So where rollouts are assigned
`together`, an engine goes on with the group that it has begun, then begins one that nobody has, and only where there is
none takes part in another's. Otherwise siblings are dealt out in turn.

A prompt may kill every engine that it comes to, and an engine takes dozens of innocent rollouts with it. So a rollout
that was on `MAX_LOSSES` lost engines is a suspect: suspects go out last, and an engine has one at a time. If it loses
that engine too, it is the likely cause, and its group is dropped.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.types import Group, GroupId, Prompt, Rollout, RolloutId, RolloutRequest

MAX_LOSSES = 2
"""Engines that may be lost with a rollout before it is a suspect."""


@dataclass(slots=True)
class _OpenGroup:
    group_id: GroupId
    prompt: Prompt
    rank: tuple[int, float]
    """Batch, and expected length with a minus: what is less goes first."""
    pending: deque[RolloutRequest]
    """Without suspects."""
    rollouts: list[Rollout | None]
    num_missing: int
    has_begun: bool = False
    is_taken: bool = False
    """An engine goes on with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """A group that will not be finished."""

    group_id: GroupId
    prompt: Prompt
    num_done: int
    """Rollouts of it that were taken."""
    num_rollouts: int
    assigned: Mapping[str, Sequence[RolloutId]]
    """Rollouts of it that engines have, by engine."""


@dataclass(slots=True)
class Ledger:
    """Groups leave in order of (batch, longest expected first, age), suspects after all others."""

    num_duplicates: int = 0
    """Deliveries that were not taken: of a rollout that was done, or from an engine that it was not assigned to."""
    num_redispatched: int = 0
    _groups: dict[GroupId, _OpenGroup] = field(default_factory=dict)
    _free: list[tuple[tuple[int, float], int, GroupId]] = field(default_factory=list)
    """Rank, age and number of groups that no engine goes on with. Here and below an entry may be of the past."""
    _taken: list[tuple[tuple[int, float], int, GroupId]] = field(default_factory=list)
    _group_of: dict[str, GroupId] = field(default_factory=dict)
    """The group that each engine goes on with."""
    _num_pending: int = 0
    _suspects: list[tuple[tuple[int, float], int, RolloutRequest]] = field(default_factory=list)
    _assigned: dict[RolloutId, tuple[str, RolloutRequest]] = field(default_factory=dict)
    _by_engine: dict[str, set[RolloutId]] = field(default_factory=dict)
    _losses: dict[RolloutId, int] = field(default_factory=dict)
    _age: int = 0

    @property
    def num_pending(self) -> int:
        return self._num_pending + len(self._suspects)

    @property
    def num_assigned(self) -> int:
        return len(self._assigned)

    def open(self, *, batch: int, prompt: Prompt, requests: Sequence[RolloutRequest], expected_length: float) -> None:
        """Add one group; all requests carry the same group_id, and their indices count from 0."""
        group_id = requests[0].group_id
        assert group_id not in self._groups, f"group {group_id} is open"
        assert [r.id for r in requests] == [RolloutId(group_id, i) for i in range(len(requests))], (
            "indices count from 0"
        )
        self._groups[group_id] = group = _OpenGroup(
            group_id, prompt, (batch, -expected_length), deque(requests), [None] * len(requests), len(requests)
        )
        self._num_pending += len(requests)
        self._set_free(group)

    def assign(self, engine: str, *, together: bool) -> RolloutRequest | None:
        """Hand a pending rollout to an engine; None if only suspects are pending and it has one already."""
        if (group := self._next_for(engine, together)) is not None:
            request = group.pending.popleft()
            self._num_pending -= 1
        elif self._suspect_on(engine) is None:
            _, _, request = heapq.heappop(self._suspects)
            group = self._groups[request.group_id]
        else:
            return None
        group.has_begun = True
        rollout_id = request.id
        self._assigned[rollout_id] = (engine, request)
        self._by_engine.setdefault(engine, set()).add(rollout_id)
        return request

    def accept(self, rollout: Rollout, engine: str) -> bool:
        """Take a rollout that `engine` delivered; False when it is not that engine's to deliver (any more)."""
        rollout_id = rollout.id
        assignment = self._assigned.get(rollout_id)
        if assignment is None or assignment[0] != engine:
            self.num_duplicates += 1
            return False
        del self._assigned[rollout_id]
        self._by_engine[engine].remove(rollout_id)
        self._losses.pop(rollout_id, None)
        group = self._groups[rollout.group_id]
        assert group.rollouts[rollout.index] is None, "an assigned rollout is not done"
        group.rollouts[rollout.index] = rollout
        group.num_missing -= 1
        return True

    def close(self, group_id: GroupId) -> Group | None:
        """Hand out a group once none of its rollouts is missing; None before that."""
        group = self._groups[group_id]
        if group.num_missing:
            return None
        del self._groups[group_id]
        return Group(group_id=group_id, prompt=group.prompt, rollouts=tuple(r for r in group.rollouts if r is not None))

    def has_begun(self, group_id: GroupId) -> bool:
        """Whether the group is open and an engine was given a rollout of it."""
        return group_id in self._groups and self._groups[group_id].has_begun

    def load(self, engine: str) -> int:
        """Rollouts that an engine has not delivered yet."""
        return len(self._by_engine.get(engine, ()))

    def lose(self, engine: str) -> tuple[int, Dropped | None]:
        """Give back what a lost engine has not delivered; returns how many rollouts that is, and the group of the
        suspect that was on it, which is dropped."""
        suspect = self._suspect_on(engine)
        dropped = None if suspect is None else self.drop(suspect.group_id)
        ids = sorted(self._by_engine.pop(engine, ()))
        self._group_of.pop(engine, None)
        for rollout_id in ids:
            _, request = self._assigned.pop(rollout_id)
            self._losses[rollout_id] = self._losses.get(rollout_id, 0) + 1
            self._give_back(self._groups[rollout_id.group_id], request)
        self.num_redispatched += len(ids)
        return len(ids), dropped

    def drop(self, group_id: GroupId) -> Dropped:
        """Forget a group. What is still sampled of it is not taken when it comes."""
        group = self._groups.pop(group_id)
        assigned: dict[str, list[RolloutId]] = {}
        for index in range(len(group.rollouts)):
            rollout_id = RolloutId(group_id, index)
            self._losses.pop(rollout_id, None)
            if assignment := self._assigned.pop(rollout_id, None):
                self._by_engine[assignment[0]].remove(rollout_id)
                assigned.setdefault(assignment[0], []).append(rollout_id)
        self._num_pending -= len(group.pending)
        self._suspects = [entry for entry in self._suspects if entry[-1].group_id != group_id]
        heapq.heapify(self._suspects)
        return Dropped(
            group_id=group_id,
            prompt=group.prompt,
            num_done=len(group.rollouts) - group.num_missing,
            num_rollouts=len(group.rollouts),
            assigned=assigned,
        )

    def _suspect_on(self, engine: str) -> RolloutId | None:
        ids = self._by_engine.get(engine, ()) if self._losses else ()
        return next((one for one in ids if self._losses.get(one, 0) >= MAX_LOSSES), None)

    def _next_for(self, engine: str, together: bool) -> _OpenGroup | None:
        """The group that an engine takes its next rollout from. Older batches go first in any case."""
        begun = self._group_of.get(engine)
        own = None if begun is None else self._groups.get(begun)
        free, taken = self._first(self._free, is_taken=False), self._first(self._taken, is_taken=True)
        others = [group for group in (free, taken) if group is not None]
        oldest = min((group.rank[0] for group in others), default=None)
        if together and own is not None and own.pending and (oldest is None or own.rank[0] <= oldest):
            return own
        chosen = next((group for group in others if group.rank[0] == oldest), None)
        if together and chosen is not None:
            self._group_of[engine] = chosen.group_id
            if not chosen.is_taken:
                chosen.is_taken = True
                self._enter(self._taken, chosen)
        return chosen

    def _first(self, queue: list[tuple[tuple[int, float], int, GroupId]], *, is_taken: bool) -> _OpenGroup | None:
        while queue:
            group = self._groups.get(queue[0][-1])
            if group is not None and group.pending and group.is_taken == is_taken:
                return group
            heapq.heappop(queue)
        return None

    def _set_free(self, group: _OpenGroup) -> None:
        group.is_taken = False
        self._enter(self._free, group)

    def _enter(self, queue: list[tuple[tuple[int, float], int, GroupId]], group: _OpenGroup) -> None:
        self._age += 1
        heapq.heappush(queue, (group.rank, self._age, group.group_id))

    def _give_back(self, group: _OpenGroup, request: RolloutRequest) -> None:
        if self._losses[request.id] >= MAX_LOSSES:
            self._age += 1
            heapq.heappush(self._suspects, (group.rank, self._age, request))
            return
        group.pending.append(request)
        self._num_pending += 1
        self._set_free(group)
