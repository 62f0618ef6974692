"""What the cluster has to give, asked of Ray: nodes, their free CPUs and GPUs, and whether those are MIG slices."""

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
"""Copies of a batch at a time: rollouts that arrive, samples to score, samples to train on, and the next batch."""
_SMALLEST_STORE = 512 * 2**20


def object_store_bytes(config: Config, memory_bytes: int) -> int:
    """Size of Ray's object store, through which rollouts and samples travel: what a step has in it, up to 30 % of the
    memory, which is Ray's own default. What does not fit Ray writes to disk."""
    rollout = config.rollout
    num_tokens = rollout.prompts_per_step * rollout.group_size * rollout.engine.max_model_len
    return max(_SMALLEST_STORE, min(_BATCHES * _BYTES_PER_TOKEN * num_tokens, int(0.3 * memory_bytes)))


def cluster_nodes(*, for_gpus: bool) -> list[Node]:
    """The nodes of the cluster that this process is connected to. Whether GPUs are slices is asked `for_gpus` only."""
    table, free = ray.nodes(), available_resources_per_node()
    sliced = _sliced_nodes(table, free) if for_gpus else ()
    return nodes_from(table, free, driver=ray.get_runtime_context().get_node_id(), sliced=sliced)


def _sliced_nodes(table: Sequence[Mapping[str, Any]], free: Mapping[str, Mapping[str, float]]) -> set[str]:
    """Ids of the nodes whose GPUs are MIG slices.

    Ray learns of slices only by `CUDA_VISIBLE_DEVICES=MIG-...,MIG-... ray start --num-gpus N`, counts each as a GPU and
    gives it to a worker by that name. So one worker of each node with a free GPU is asked what it was given. A node
    that does not answer is taken for one with whole GPUs, as most are.
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
