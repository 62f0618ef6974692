"""Ray for as long as a run lasts: a cluster that is joined, or one of its own that ends when the driver does."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import ray
from ray._private import ray_constants

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
    # Logs and sockets. Ray opens its directory to everybody, so it gets one inside a closed one. A socket's path may
    # have 107 characters, which is why this is not TMPDIR.
    scratch = Path(tempfile.mkdtemp(prefix="paceline-", dir="/tmp"))
    with _reaped(scratch, directory), _loopback_only():
        with _keeping_sigterm():
            ray.init(
                address="local",
                _temp_dir=str(scratch / "ray"),
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
def _loopback_only() -> Iterator[None]:
    """A Ray that is started inside listens on 127.0.0.1 only, and answers only to processes that inherit its token.

    Ray listens so on macOS and Windows, and calls the switch by their names. It reads the switch when it is imported,
    which is long ago, so the constant is set as well. Without a token in the environment Ray would write one into the
    home directory, for every user to read; it reads that once in a process, so it stays.
    """
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"
    before, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
        del os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR]


@contextmanager
def _reaped(*directories: Path | None) -> Iterator[None]:
    """What is started inside ends with the context, or with this process if that comes first, and the directories are
    removed."""
    mark = secrets.token_hex(8)
    os.environ[reaper.VARIABLE] = mark
    # Its standard input ends when this process does, however that happens. A session of its own: Ctrl-C is not for it.
    command = [sys.executable, "-m", reaper.__name__, mark, *(str(path) for path in directories if path is not None)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)  # noqa: S603
    try:
        yield
    finally:
        process.communicate()
        if process.returncode:  # it was killed with the others when a command took too long to end
            for path in filter(None, directories):
                shutil.rmtree(path, ignore_errors=True)
        os.environ.pop(reaper.VARIABLE)
