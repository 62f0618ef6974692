"""Endless prompts with a position that a later run can go on from."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from paceline.files import sha256_of
from paceline.types import Prompt


class PromptStream:
    """Prompts follow from the data and its seed alone, so a position is a count; a checksum of all prompts up to it
    tells whether the data is still the same."""

    def __init__(self, prompts: Iterator[Prompt]) -> None:
        self._prompts = prompts
        self._ahead: deque[Prompt] = deque()
        self._sha256 = ""
        """Covers all prompts that were taken: each checksum is of the one before it as well."""
        self.num_taken = 0

    def peek(self, num: int) -> list[Prompt]:
        """The next prompts, which stay the next."""
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
        """Go on from a position; returns the prompts at the positions `again` before it. Raises ValueError if other
        prompts lead there than before."""
        found: dict[int, Prompt] = {}
        while self.num_taken < state["num_taken"]:
            position, prompt = self.num_taken, self.take()
            if position in again:
                found[position] = prompt
        if self._sha256 != state["sha256"]:
            raise ValueError(
                f"data: the first {state['num_taken']} prompts are not those that this run was trained on; a run can "
                "only go on with the data that it began with"
            )
        return found
