"""Track rollouts through engine failures so that each one counts exactly once.

A rollout is pending, assigned to one engine, or done. A lost engine returns its unfinished rollouts to the queue. Its
later deliveries are refused: they may come from a half-written policy, and their rollouts are assigned elsewhere by
then.

Siblings share a prompt, which an engine reads once. So if rollouts are assigned `together`, an engine
continues its group, then begins a group that no engine has, and only then joins the group of another engine. Otherwise
siblings are distributed in turn.

A prompt may kill every engine that reads it, along with dozens of other rollouts. So a rollout that was on `MAX_LOSSES`
lost engines is a suspect: suspects are assigned last, one per engine. If that engine is lost too, the suspect is the
likely cause, and its group is dropped.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.types import Group, GroupId, Prompt, Rollout, RolloutId, RolloutRequest

MAX_LOSSES = 2
"""Lost engines that make a rollout a suspect."""
_Rank = tuple[int, float]
"""Batch and negative expected length of a group; the lowest is assigned first."""
_Queued = tuple[_Rank, int, GroupId]
"""Rank, age and id of a group."""


@dataclass(slots=True)
class _OpenGroup:
    group_id: GroupId
    prompt: Prompt
    rank: _Rank
    pending: deque[RolloutRequest]
    """Without suspects."""
    rollouts: list[Rollout | None]
    num_missing: int
    has_begun: bool = False
    is_taken: bool = False
    """An engine continues it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """A group that will not be finished."""

    group_id: GroupId
    prompt: Prompt
    num_done: int
    """Accepted rollouts."""
    num_rollouts: int
    assigned: Mapping[str, Sequence[RolloutId]]
    """Its unfinished rollouts by engine."""


class Ledger:
    """Assigns groups in order of (batch, longest expected first, age), and suspects last."""

    def __init__(self) -> None:
        self.num_duplicates = 0
        """Refused deliveries: of a finished rollout, or by an engine to which it was not assigned."""
        self.num_redispatched = 0
        self._groups: dict[GroupId, _OpenGroup] = {}
        self._free: list[_Queued] = []
        """Groups that no engine continues. Entries here and below may be outdated."""
        self._taken: list[_Queued] = []
        self._group_of: dict[str, GroupId] = {}
        """The group that each engine continues."""
        self._num_pending = 0
        self._suspects: list[tuple[_Rank, int, RolloutRequest]] = []
        self._assigned: dict[RolloutId, tuple[str, RolloutRequest]] = {}
        self._by_engine: dict[str, set[RolloutId]] = {}
        self._losses: dict[RolloutId, int] = {}
        self._age = 0

    @property
    def num_pending(self) -> int:
        return self._num_pending + len(self._suspects)

    @property
    def num_assigned(self) -> int:
        return len(self._assigned)

    def open(self, *, batch: int, prompt: Prompt, requests: Sequence[RolloutRequest], expected_length: float) -> None:
        """Add the requests of one group, with indices from 0."""
        group_id = requests[0].group_id
        assert group_id not in self._groups, f"group {group_id} is open"
        assert [r.index for r in requests] == list(range(len(requests))), "indices count from 0"
        self._groups[group_id] = group = _OpenGroup(
            group_id, prompt, (batch, -expected_length), deque(requests), [None] * len(requests), len(requests)
        )
        self._num_pending += len(requests)
        self._set_free(group)

    def assign(self, engine: str, *, together: bool) -> RolloutRequest | None:
        """Assign a pending rollout to an engine; None if only suspects are pending and the engine has one."""
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
        """Accept a rollout from `engine`; False if it is not assigned to that engine."""
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
        """Return a group and forget it once it is complete; None before that."""
        group = self._groups[group_id]
        if group.num_missing:
            return None
        del self._groups[group_id]
        return Group(group_id=group_id, prompt=group.prompt, rollouts=tuple(r for r in group.rollouts if r is not None))

    def has_begun(self, group_id: GroupId) -> bool:
        """Return whether the group is open and an engine has received one of its rollouts."""
        return group_id in self._groups and self._groups[group_id].has_begun

    def load(self, engine: str) -> int:
        """Return the number of rollouts assigned to an engine."""
        return len(self._by_engine.get(engine, ()))

    def lose(self, engine: str) -> tuple[int, Dropped | None]:
        """Return a lost engine's rollouts to the queue, and drop the group of its suspect.

        Return the number of rollouts and the dropped group."""
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
        """Forget a group; its rollouts that still arrive are refused."""
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
        """Return the group of an engine's next rollout. Older batches always go first."""
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

    def _first(self, queue: list[_Queued], *, is_taken: bool) -> _OpenGroup | None:
        while queue:
            group = self._groups.get(queue[0][-1])
            if group is not None and group.pending and group.is_taken == is_taken:
                return group
            heapq.heappop(queue)
        return None

    def _set_free(self, group: _OpenGroup) -> None:
        group.is_taken = False
        self._enter(self._free, group)

    def _enter(self, queue: list[_Queued], group: _OpenGroup) -> None:
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
