"""Contained failures: a drafter may fail without ending a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

MAX_FAILURES = 3
"""Consecutive failures of one operation before it is abandoned."""


class Failures:
    """Count failures, report the first of each operation, and give up after repeated ones."""

    def __init__(
        self, tell: Callable[[str, BaseException], object], give_up: Callable[[str], object] = lambda what: None
    ) -> None:
        self._tell, self._give_up = tell, give_up
        self._in_a_row: Counter[str] = Counter()
        self._told: set[str] = set()
        self.num, self.given_up = 0, False

    @contextmanager
    def contained(self, what: str) -> Iterator[None]:
        """Catch and count exceptions."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  counted
            self.note(what, error)
        else:
            self._in_a_row[what] = 0

    def note(self, what: str, error: BaseException) -> None:
        self.num += 1
        self._in_a_row[what] += 1
        if what not in self._told:
            self._told.add(what)
            self._tell(what, error)
        if self._in_a_row[what] == MAX_FAILURES and not self.given_up:
            self.given_up = True
            self._give_up(what)
