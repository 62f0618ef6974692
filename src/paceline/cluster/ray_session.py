"""Join a Ray cluster, or start a local one that ends with the driver."""

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
    """Connect to a cluster, or start Ray on this machine, inside the context. `directory` is removed last and once,
    since another run may then use its name."""
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
    # Engines and learner take turns, so more processes than cores are harmless.
    wanted = config.rollout.num_engines * config.rollout.engine.tensor_parallel_size + config.learner.world_size
    # Logs and sockets. Ray's directory is world-readable, so its parent is private. A socket's path is limited to 107
    # characters, so this is not TMPDIR.
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
                _system_config={"worker_niceness": 0},  # Ray's default of 15 lets desktop processes starve engines
            )
        try:
            yield
        finally:
            ray.shutdown()


@contextmanager
def _keeping_sigterm() -> Iterator[None]:
    """Restore the handler of SIGTERM after Ray has started. Ray's handler aborts the driver without ending the run's
    processes."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _loopback_only() -> Iterator[None]:
    """Make a Ray that starts inside the context listen on 127.0.0.1 only, and accept only processes with its token.

    Ray listens locally on macOS and Windows, and reads its switch on import, so the constant is set as well. Without a
    token in the environment, Ray would write a world-readable one into the home directory. The token stays set, because
    Ray reads it once per process.
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
    """End all processes started inside, and remove the directories, with the context or with this process."""
    mark = secrets.token_hex(8)
    os.environ[reaper.VARIABLE] = mark
    # Its standard input ends with this process in any case. Its own session shields it from Ctrl-C.
    command = [sys.executable, "-m", reaper.__name__, mark, *(str(path) for path in directories if path is not None)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)  # noqa: S603
    try:
        yield
    finally:
        process.communicate()
        if process.returncode:  # it was killed along with the others
            for path in filter(None, directories):
                shutil.rmtree(path, ignore_errors=True)
        os.environ.pop(reaper.VARIABLE)
