"""Infinite iterator of training prompts with a position to resume from."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from paceline.files import sha256_of
from paceline.types import Prompt


class PromptStream:
    """Prompts depend only on the data and its seed, so a position is a count. A checksum of all prompts up to it
    detects changed data."""

    def __init__(self, prompts: Iterator[Prompt]) -> None:
        self._prompts = prompts
        self._ahead: deque[Prompt] = deque()
        self._sha256 = ""
        """Chained checksum of all prompts taken."""
        self.num_taken = 0

    def peek(self, num: int) -> list[Prompt]:
        """Return the next prompts without taking them."""
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
