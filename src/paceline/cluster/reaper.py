"""A process that outlives the driver by a moment and ends what the driver's Ray has left.

A Ray that was started by a driver mostly dies with it, but its agents linger when the driver was killed. Every process
of a run inherits a mark in its environment, wherever it moves, so that nobody else's processes are touched. A process
that sets its title may wipe the mark, as Ray's agents do; it is known as the child of one that has it, and noted while
that one lives.

    python -m paceline.cluster.reaper MARK DIRECTORY...   waits until its standard input, a pipe from the driver, ends

The directories are the run's own, in shared memory and for Ray; nothing else would ever empty them. Weights that a
killed learner has left in shared memory go too.
"""

from __future__ import annotations

import os
import select
import shutil
import sys

import psutil

from paceline.files import sweep_segments

VARIABLE = "PACELINE_RUN"
_LOOK_EVERY_S = 2.0


def belonging(mark: str) -> set[psutil.Process]:
    """All processes that carry the mark, and their children; this one excepted."""
    wanted = f"{VARIABLE}={mark}".encode()
    carriers, children = set(), []
    for process in psutil.process_iter():
        try:
            with open(f"/proc/{process.pid}/environ", "rb") as environ:  # noqa: PTH123  psutil's own would parse every variable
                if wanted in environ.read().split(b"\0"):
                    carriers.add(process)
                else:
                    children.append((process, process.ppid()))
        except (OSError, psutil.Error):
            continue  # it has ended, or is another user's
    parents = {process.pid for process in carriers} - {os.getpid()}
    carriers.update(process for process, parent in children if parent in parents)
    return {process for process in carriers if process.pid != os.getpid()}


def main(mark: str, *directories: str) -> None:
    known: set[psutil.Process] = set()
    while not select.select([sys.stdin], [], [], _LOOK_EVERY_S)[0]:
        known |= belonging(mark)
    while alive := {process for process in known | belonging(mark) if _alive(process)}:
        # again and again: a process may have started another while it was looked at
        for process in alive:
            try:
                process.kill()  # psutil compares start times, so that a reused id is left alone
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(alive, timeout=0.2)
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)
    sweep_segments()


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


if __name__ == "__main__":
    main(*sys.argv[1:])
