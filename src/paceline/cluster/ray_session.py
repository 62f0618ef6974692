"""Join a Ray cluster or start a local one, which ends with the driver. Query its free CPUs, GPUs and MIG slices."""

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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import ray_constants
from ray._private.state import available_resources_per_node  # Ray's state API needs its dashboard
from ray.exceptions import GetTimeoutError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from paceline.cluster import reaper
from paceline.cluster.layout import Node, nodes_from
from paceline.config import Config

_ASK_DEADLINE_S = 60.0
_BYTES_PER_TOKEN = 16
"""Token id, behavior and learner log-probability, and weight in the loss."""
_BATCHES = 4
"""Concurrent copies of a batch: arriving rollouts, samples to score, samples to train on, and the next batch."""
_SMALLEST_STORE = 512 * 2**20


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


def object_store_bytes(config: Config, memory_bytes: int) -> int:
    """Return the size of Ray's object store: the rollouts and samples of a step, up to 30 % of the memory, which is
    Ray's default. Ray spills larger contents to disk."""
    rollout = config.rollout
    num_tokens = rollout.prompts_per_step * rollout.group_size * rollout.engine.max_model_len
    return max(_SMALLEST_STORE, min(_BATCHES * _BYTES_PER_TOKEN * num_tokens, int(0.3 * memory_bytes)))


def cluster_nodes(*, for_gpus: bool) -> list[Node]:
    """Return the nodes of the connected cluster. MIG slices are detected only `for_gpus`."""
    table, free = ray.nodes(), available_resources_per_node()
    sliced = _sliced_nodes(table, free) if for_gpus else ()
    return nodes_from(table, free, driver=ray.get_runtime_context().get_node_id(), sliced=sliced)


def _sliced_nodes(table: Sequence[Mapping[str, Any]], free: Mapping[str, Mapping[str, float]]) -> set[str]:
    """Return the ids of nodes with MIG slices for GPUs.

    Ray gets slices only from `CUDA_VISIBLE_DEVICES=MIG-...,MIG-... ray start --num-gpus N`, counts each as a GPU and
    assigns it to a worker by that name. So a worker on each node with a free GPU reports its GPUs. A node without an
    answer is assumed to have whole GPUs.
    """
    asked = {
        _given_gpus.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(): node["NodeID"]
        for node in table
        if node["Alive"] and free.get(node["NodeID"], node["Resources"]).get("GPU", 0) >= 1
    }
    sliced = set()
    for answer, node in asked.items():
        try:
            gpus = ray.get(answer, timeout=_ASK_DEADLINE_S)
        except GetTimeoutError:
            ray.cancel(answer)
            continue
        if any(str(gpu).startswith("MIG-") for gpu in gpus):
            sliced.add(node)
    return sliced


@ray.remote(num_cpus=0, num_gpus=0.01, max_retries=0)
def _given_gpus() -> list[int] | list[str]:
    return ray.get_gpu_ids()
