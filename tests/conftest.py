"""Tests that run side by side (pytest-xdist's `-n`) share the cores out: on one that two of them use, threads that
wait for each other are many times slower, and engines take the cores that they are allowed."""

from __future__ import annotations

import os


def pytest_configure() -> None:
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        cores, count = sorted(os.sched_getaffinity(0)), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        which = int(worker.removeprefix("gw"))
        os.sched_setaffinity(0, cores[which::count] or cores)
