"""Kill processes of the driver's Ray that outlive the driver, and remove the run's directories.

A local Ray mostly dies with its driver, but its agents linger if the driver is killed. All processes of a run inherit a
mark in their environment, so other processes are safe. A process that sets its title may overwrite the mark, as Ray's
agents do; it is identified as a child of a marked process while that process lives.

    python -m paceline.cluster.reaper MARK DIRECTORY...   waits until its standard input, a pipe from the driver, ends

The directories are in shared memory and in /tmp, where nothing else would remove them. The weights of a killed learner
in shared memory are removed as well.
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
    """Return all processes with the mark and their children, without this process."""
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
            continue  # it has ended, or belongs to another user
    parents = {process.pid for process in carriers} - {os.getpid()}
    carriers.update(process for process, parent in children if parent in parents)
    return {process for process in carriers if process.pid != os.getpid()}


def main(mark: str, *directories: str) -> None:
    known: set[psutil.Process] = set()
    while not select.select([sys.stdin], [], [], _LOOK_EVERY_S)[0]:
        known |= belonging(mark)
    while alive := {process for process in known | belonging(mark) if _alive(process)}:
        # repeat: a process may have started another one meanwhile
        for process in alive:
            try:
                process.kill()  # psutil compares start times, so a reused id is safe
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
