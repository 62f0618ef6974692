"""Share the cores out among pytest-xdist's workers, and let child processes import `benchmarks`.

On a core that two workers use, threads that wait for each other are many times slower, and engines take every core that
they are allowed."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import settings

# A deadline fails on a busy machine.
settings.register_profile("paceline", deadline=None)
settings.load_profile("paceline")


def pytest_configure() -> None:
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        cores, count = sorted(os.sched_getaffinity(0)), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        which = int(worker.removeprefix("gw"))
        os.sched_setaffinity(0, cores[which::count] or cores)
