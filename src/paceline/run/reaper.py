"""A process that outlives the driver by a moment: when the driver is gone, it ends what the driver's Ray has left.

A Ray that was started by a driver mostly dies with it, but its agents linger when the driver was killed. Every process of a run
carries a mark in its environment, which it inherits wherever it moves, so that nobody else's processes are touched.

    python -m paceline.run.reaper MARK      waits for the end of its standard input, which is a pipe from the driver
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

VARIABLE = "PACELINE_RUN"


def marked(mark: str) -> list[int]:
    """Ids of all processes that carry the mark, except this one."""
    wanted = f"{VARIABLE}={mark}".encode()
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            carries = wanted in (directory / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # it has ended, or is another user's
        if carries and int(directory.name) != os.getpid():
            found.append(int(directory.name))
    return found


def main(mark: str) -> None:
    sys.stdin.buffer.read()
    while pids := marked(mark):  # again and again: a process may have started another while it was looked at
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


if __name__ == "__main__":
    main(sys.argv[1])
