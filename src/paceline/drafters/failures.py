"""Failures that end where they happen: a drafter may fail, a rollout and a host's training may not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

MAX_FAILURES = 3
"""Failures of one thing in a row after which it is given up: a full disk, a directory that is gone."""


class Failures:
    """Counts failures, tells the first of each thing, and says when one has failed too often in a row."""

    def __init__(
        self, tell: Callable[[str, BaseException], object], give_up: Callable[[str], object] = lambda what: None
    ) -> None:
        self._tell, self._give_up = tell, give_up
        self._in_a_row: Counter[str] = Counter()
        self._told: set[str] = set()
        self.num, self.given_up = 0, False

    @contextmanager
    def contained(self, what: str) -> Iterator[None]:
        """Whatever is raised inside ends here."""
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
