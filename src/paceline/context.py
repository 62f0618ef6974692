"""What a long job gets from its caller: where to report, where to cache, and whether to go on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import TextIO

from paceline.types import PacelineError


class CancelledError(PacelineError):
    """The caller does not want the result any more."""


class RunInterruptedError(CancelledError):
    """A run was told to end before its last step, and all its processes have ended."""

    def __init__(self, number: signal.Signals, directory: Path | None) -> None:
        """`directory` is what the run can go on from; None if it keeps nothing."""
        super().__init__(number, directory)
        self.number, self.directory = number, directory

    @property
    def exit_code(self) -> int:
        """EX_TEMPFAIL tells a cluster's scheduler, which ends jobs by SIGTERM, to start the run again."""
        ended_by_cluster = self.number == signal.SIGTERM and self.directory is not None
        return os.EX_TEMPFAIL if ended_by_cluster else 128 + self.number

    def __str__(self) -> str:
        advice = "run.checkpoint_every is 0, so there is nothing to go on from"
        if self.directory is not None:
            advice = f"go on with: paceline train --resume {self.directory}"
        return f"interrupted; all processes of the run have ended; {advice}"


def time_left(seconds: float) -> str:
    """Say for how long a job still runs."""
    if seconds < 90:
        return f"{max(0.0, seconds):.0f} s left"
    return f"{seconds / 60:.0f} min left" if seconds < 5400 else f"{seconds / 3600:.1f} h left"


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Passed down as one argument. Every progress report is also a point at which the job can be cancelled."""

    report: Callable[[str], None]
    """Takes one line for the person who waits."""
    cache_root: Path
    """Directory of policies and drafters that are built once."""
    terminal: TextIO | None = None
    """Where a picture may be drawn and drawn again; None in a log."""
    cancelled: Event = field(default_factory=Event)
    """Set by the caller, from any thread or signal handler."""

    def progress(self, line: str) -> None:
        """Report a line; raises CancelledError once the job was cancelled."""
        if self.cancelled.is_set():
            raise CancelledError("cancelled")
        self.report(line)

    def labelled(self, label: str) -> Context:
        """Return the same context for a part of the job whose reports begin with `label`."""
        return replace(self, report=lambda line: self.report(f"{label}: {line}"))

    def quiet(self) -> Context:
        """Return the same context for a part of the job that does not report."""
        return replace(self, report=lambda line: None)
