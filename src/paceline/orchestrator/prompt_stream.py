"""Endless prompts as the batches of a run, with a position that a later run can go on from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from paceline.files import sha256_of
from paceline.types import Prompt


class PromptStream:
    """Prompts follow from the data and its seed alone, so a position is a count; a checksum of all prompts up to it
    tells whether the data is still the same."""

    def __init__(self, prompts: Iterator[Prompt], batch_size: int) -> None:
        self._prompts, self._batch_size = prompts, batch_size
        self._ahead: list[Prompt] = []
        self._checksums = [""]
        """After each batch that was taken, the first of them before any; each is also of the one before it."""

    def peek(self) -> list[Prompt]:
        """The next batch, which stays the next."""
        self._ahead = self._ahead or list(islice(self._prompts, self._batch_size))
        return self._ahead

    def take(self) -> list[Prompt]:
        batch, self._ahead = self.peek(), []
        named = (f"{prompt.id}\0".encode() + prompt.token_ids.tobytes() for prompt in batch)
        self._checksums.append(sha256_of([self._checksums[-1].encode(), *named]))
        return batch

    @property
    def num_taken(self) -> int:
        """Batches that were taken."""
        return len(self._checksums) - 1

    def state(self, num_batches: int) -> dict[str, Any]:
        """Position after so many batches; more may have been taken since."""
        return {"num_batches": num_batches, "sha256": self._checksums[num_batches]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a position; raises ValueError if other prompts lead there than before."""
        while self.num_taken < state["num_batches"]:
            self.take()
        if self._checksums[-1] != state["sha256"]:
            raise ValueError(
                f"data: the first {state['num_batches']} batches are not those that this run was trained on; a run can "
                "only go on with the data that it began with"
            )
