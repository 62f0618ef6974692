"""Which rollout of which group is where: every rollout is counted exactly once, whatever dies in between.

A rollout's identity is (group_id, index). It is pending, assigned to one engine, or done. An engine that is lost
gives its unfinished rollouts back to the queue; what it delivers afterwards is not taken (it may have been sampled
from a half-written policy, and its rollouts are assigned elsewhere by then). Pure logic: no clock, no I/O, no engine.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.types import Group, PacelineError, Prompt, Rollout, RolloutRequest

Key = tuple[int, int]

MAX_ATTEMPTS = 3
"""A prompt that loses this many engines is the likely cause; going on would lose them all."""


@dataclass(slots=True)
class _OpenGroup:
    prompt: Prompt
    rollouts: list[Rollout | None]
    num_missing: int


@dataclass(slots=True)
class Ledger:
    """Pending rollouts leave in order of (batch, longest expected first, age)."""

    num_duplicates: int = 0
    """Deliveries that were not taken: of a rollout that was done, or from an engine that it was not assigned to."""
    num_redispatched: int = 0
    _groups: dict[int, _OpenGroup] = field(default_factory=dict)
    _pending: list[tuple[int, float, int, RolloutRequest]] = field(default_factory=list)
    _assigned: dict[Key, tuple[str, int, float, RolloutRequest]] = field(default_factory=dict)
    _by_engine: dict[str, set[Key]] = field(default_factory=dict)
    _attempts: dict[Key, int] = field(default_factory=dict)
    _age: int = 0

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    @property
    def num_assigned(self) -> int:
        return len(self._assigned)

    def open(self, *, batch: int, prompt: Prompt, requests: Sequence[RolloutRequest], expected_length: float) -> None:
        """Add one group; all requests carry the same group_id, and their indices count from 0."""
        group_id = requests[0].group_id
        assert group_id not in self._groups, f"group {group_id} is open"
        assert [r.key for r in requests] == [(group_id, i) for i in range(len(requests))], "indices count from 0"
        self._groups[group_id] = _OpenGroup(prompt, [None] * len(requests), len(requests))
        for request in requests:
            self._push(batch, -expected_length, request)

    def assign(self, engine: str) -> RolloutRequest:
        """Hand the first pending rollout to an engine."""
        batch, priority, _, request = heapq.heappop(self._pending)
        self._assigned[request.key] = (engine, batch, priority, request)
        self._by_engine.setdefault(engine, set()).add(request.key)
        return request

    def accept(self, rollout: Rollout, engine: str) -> bool:
        """Take a rollout that `engine` delivered; False when it is not that engine's to deliver (any more)."""
        assignment = self._assigned.get(rollout.key)
        if assignment is None or assignment[0] != engine:
            self.num_duplicates += 1
            return False
        del self._assigned[rollout.key]
        self._by_engine[engine].remove(rollout.key)
        self._attempts.pop(rollout.key, None)
        group = self._groups[rollout.group_id]
        assert group.rollouts[rollout.index] is None, "an assigned rollout is not done"
        group.rollouts[rollout.index] = rollout
        group.num_missing -= 1
        return True

    def close(self, group_id: int) -> Group | None:
        """Hand out a group once none of its rollouts is missing; None before that."""
        group = self._groups[group_id]
        if group.num_missing:
            return None
        del self._groups[group_id]
        return Group(group_id=group_id, prompt=group.prompt, rollouts=tuple(r for r in group.rollouts if r is not None))

    def load(self, engine: str) -> int:
        """Rollouts that an engine has not delivered yet."""
        return len(self._by_engine.get(engine, ()))

    def lose(self, engine: str) -> int:
        """Give back what a lost engine has not delivered; returns how many rollouts that is."""
        keys = sorted(self._by_engine.pop(engine, ()))
        for key in keys:
            _, batch, priority, request = self._assigned.pop(key)
            attempts = self._attempts.get(key, 1) + 1
            if attempts > MAX_ATTEMPTS:
                prompt = self._groups[request.group_id].prompt
                raise PacelineError(
                    f"prompt {prompt.id!r} was on {MAX_ATTEMPTS} engines that were lost; it is the likely cause. "
                    "Look at this prompt and at the engines' logs; lower rollout.engine.max_num_seqs if memory ran out."
                )
            self._attempts[key] = attempts
            self._push(batch, priority, request)
        self.num_redispatched += len(keys)
        return len(keys)

    def _push(self, batch: int, priority: float, request: RolloutRequest) -> None:
        self._age += 1
        heapq.heappush(self._pending, (batch, priority, self._age, request))
