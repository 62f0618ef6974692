"""Placement on a real Ray: several raylets on this machine with made-up GPUs, and actors that touch none of them."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import remove_placement_group

from contexts import arena_config
from paceline.cluster.layout import ClusterLayout
from paceline.cluster.placement import create, decide, reserve
from paceline.config import Config


@pytest.fixture(scope="module")
def nodes() -> Iterator[dict[str, str]]:
    """A head without GPUs, where the driver runs, and nodes with 8 GPUs, 2 GPUs and 2 MIG slices; their ids."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "num_gpus": 0, "include_dashboard": False})
    try:
        slices = {"CUDA_VISIBLE_DEVICES": "MIG-0a,MIG-0b"}
        made = {
            "eight": cluster.add_node(num_cpus=8, num_gpus=8, wait=False),
            "two": cluster.add_node(num_cpus=4, num_gpus=2, wait=False),
            "slices": cluster.add_node(num_cpus=4, num_gpus=2, env_vars=slices, wait=False),
        }
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        yield {name: node.node_id for name, node in made.items()}
    finally:
        ray.shutdown()
        cluster.shutdown()


def config(num_engines: int, per_engine: int, world_size: int) -> Config:
    return arena_config(
        [
            f"rollout.num_engines={num_engines}",
            f"rollout.engine.tensor_parallel_size={per_engine}",
            f"learner.world_size={world_size}",
        ],
    )


def landed(layout: ClusterLayout) -> list[tuple[str, list[str]]]:
    """Node and GPUs that an actor in each bundle was given."""

    class Stub:
        def where(self) -> tuple[str, list[str]]:
            context = ray.get_runtime_context()
            return context.get_node_id(), context.get_accelerator_ids()["GPU"]

    group = reserve(layout)
    actors: list[Any] = [create(Stub, layout, group, index) for index in range(len(layout.bundles))]
    try:
        return ray.get([actor.where.remote() for actor in actors], timeout=120)
    finally:
        for actor in actors:
            ray.kill(actor)
        remove_placement_group(group)


def test_bundles_land_where_they_were_planned(nodes: dict[str, str]) -> None:
    """A head without GPUs decides; Ray's own packing would put ranks onto the node that engines of four need."""
    layout = asyncio.run(decide(config(2, 4, 2)))
    assert (layout.device, layout.transport) == ("gpu", "distributed")
    found = landed(layout)
    assert [node for node, _ in found] == [bundle.node for bundle in layout.bundles]
    assert [node for node, _ in found] == [nodes["eight"]] * 2 + [nodes["two"]] * 2
    assert [len(gpus) for _, gpus in found] == [4, 4, 1, 1]
    assert not set(found[0][1]) & set(found[1][1]), "two engines on one GPU"


def test_run_waits_for_gpus_that_another_job_is_about_to_free(nodes: dict[str, str]) -> None:
    """What the last run held is free a moment after it has ended; planned at once, the next one would be refused. When
    only slices are left, they are recognized and used."""

    async def both() -> ClusterLayout:
        first = await decide(config(2, 4, 2))
        group = reserve(first)
        waiting = asyncio.create_task(decide(config(1, 8, 1)))
        try:
            sliced = await decide(config(1, 1, 1))
            assert (sliced.transport, {bundle.node for bundle in sliced.bundles}) == (
                "shared_memory",
                {nodes["slices"]},
            )
            assert not waiting.done()
        finally:
            remove_placement_group(group)
        return await waiting

    assert [bundle.node for bundle in asyncio.run(both()).bundles] == [nodes["eight"], nodes["two"]]


def test_sigterm_reaches_the_run_after_ray_has_started() -> None:
    """Ray's own handler aborts the process: a preempted run could not end its engines or say how to go on."""
    program = """
import asyncio, os, signal
from paceline.cluster.ray_session import ray_session
from paceline.config import load_config

async def work():
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asyncio.current_task().cancel)
    with ray_session(load_config(None, ["policy.model=arena:tiny"]), None):
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(30)

try:
    asyncio.run(work())
except asyncio.CancelledError:
    raise SystemExit(75)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=120, check=False)
    assert done.returncode == 75, done.stderr[-2000:]
