"""Ray for as long as a run lasts: a cluster that is joined, or one of its own that ends when the driver does."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import ray

from paceline.cluster import reaper
from paceline.cluster.resources import object_store_bytes
from paceline.config import Config


@contextmanager
def ray_session(config: Config, directory: Path | None) -> Iterator[None]:
    """Connect to a cluster, or start Ray on this machine for as long as the context lasts; `directory` is removed with
    it, last and once: its name is free then, and another run may take it."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if config.cluster.address is not None:
        try:
            with _keeping_sigterm():
                ray.init(address=config.cluster.address, log_to_driver=False, logging_level=logging.ERROR)
            yield
        finally:
            ray.shutdown()
            if directory is not None:
                shutil.rmtree(directory, ignore_errors=True)
        return
    # A laptop has fewer cores than a run has processes. Engines and learner take turns, so promising more does no harm.
    wanted = config.rollout.num_engines * config.rollout.engine.tensor_parallel_size + config.learner.world_size
    with _reaped(directory):
        with _keeping_sigterm():
            ray.init(
                address="local",
                num_cpus=max(wanted, len(os.sched_getaffinity(0))),
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=object_store_bytes(config, psutil.virtual_memory().total),
                _system_config={"worker_niceness": 0},  # Ray's 15 would leave an engine what the desktop does not want
            )
        try:
            yield
        finally:
            ray.shutdown()


@contextmanager
def _keeping_sigterm() -> Iterator[None]:
    """Put the handler of SIGTERM back when Ray has started: Ray's own prints a stack and aborts the driver, and nothing
    of the run would be ended."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _reaped(directory: Path | None) -> Iterator[None]:
    """What is started inside ends with the context, or with this process if that comes first, and `directory` is
    removed."""
    mark = secrets.token_hex(8)
    os.environ[reaper.VARIABLE] = mark
    # Its standard input ends when this process does, however that happens. A session of its own: Ctrl-C is not for it.
    command = [sys.executable, "-m", reaper.__name__, mark, *([str(directory)] if directory is not None else [])]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)  # noqa: S603
    try:
        yield
    finally:
        process.communicate()
        os.environ.pop(reaper.VARIABLE)
