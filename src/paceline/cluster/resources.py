"""Query Ray for nodes, their free CPUs and GPUs, and MIG slices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray._private.state import available_resources_per_node  # Ray's state API needs its dashboard
from ray.exceptions import GetTimeoutError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from paceline.cluster.layout import Node, nodes_from
from paceline.config import Config

_ASK_DEADLINE_S = 60.0
_BYTES_PER_TOKEN = 16
"""Token id, behaviour and learner log-probability, and weight in the loss."""
_BATCHES = 4
"""Concurrent copies of a batch: arriving rollouts, samples to score, samples to train on, and the next batch."""
_SMALLEST_STORE = 512 * 2**20


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
