"""Context of a long job: progress reports, cache directory and cancellation."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import TextIO

from paceline.types import PacelineError


class CancelledError(PacelineError):
    """The caller cancelled the job."""


class RunInterruptedError(CancelledError):
    """A signal ended the run before its last step; all its processes have ended."""

    def __init__(self, number: signal.Signals, directory: Path | None) -> None:
        """`directory` is the run to resume; None if it has no checkpoints."""
        super().__init__(number, directory)
        self.number, self.directory = number, directory

    @property
    def exit_code(self) -> int:
        """EX_TEMPFAIL asks cluster schedulers, which preempt jobs by SIGTERM, to restart the run."""
        ended_by_cluster = self.number == signal.SIGTERM and self.directory is not None
        return os.EX_TEMPFAIL if ended_by_cluster else 128 + self.number

    def __str__(self) -> str:
        advice = "it cannot be resumed because run.checkpoint_every is 0"
        if self.directory is not None:
            advice = f"resume with: paceline train --resume {self.directory}"
        return f"interrupted; all processes of the run have ended; {advice}"


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def time_left(seconds: float) -> str:
    return f"{duration(max(0.0, seconds))} left"


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Passed down as one argument. A job can be cancelled at each progress report."""

    report: Callable[[str], None]
    """Show one line to the user."""
    cache_root: Path
    """Directory for policies and drafters that are built once."""
    terminal: TextIO | None = None
    """Terminal for live displays; None if output goes to a log."""
    cancelled: Event = field(default_factory=Event)
    """Set by the caller, from any thread or signal handler."""

    def progress(self, line: str) -> None:
        """Report a line; raise CancelledError if the job was cancelled."""
        if self.cancelled.is_set():
            raise CancelledError("cancelled")
        self.report(line)
