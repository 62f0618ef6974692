"""Real vLLM on a policy small enough to start in seconds. One engine per test module: each module has its own
fixture."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.config import EngineConfig
from random_policy import make_policy


@pytest.fixture(scope="session")
def policy_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="session")
def engine_config() -> EngineConfig:
    """float32, so that log-probabilities can be compared with the reference to many digits."""
    return EngineConfig(dtype="float32", max_model_len=256, max_num_seqs=16, kv_cache_gb=0.05)


@pytest.fixture(scope="session")
def one_cpu() -> list[int]:
    """Threads that wait for each other on a busy machine are much slower than one thread."""
    return sorted(os.sched_getaffinity(0))[:1]


@pytest.fixture
def two_cpus() -> Iterator[list[int]]:
    """A core for each of two workers, also for a test that runs beside others and has one core to itself."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    try:
        if len(cores := sorted(os.sched_getaffinity(0))) < 2:
            pytest.skip("each worker needs a core of its own")
        yield cores[:2]
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """One event loop for a module: an engine lives on the loop that it was started on."""
    with asyncio.Runner() as runner:
        yield runner
