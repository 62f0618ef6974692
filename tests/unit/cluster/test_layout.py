"""Pictures of clusters and what a run does with each: the driver's own hardware never enters."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from contexts import arena_config
from paceline.cluster.layout import ClusterLayout, Node, nodes_from, plan
from paceline.cluster.placement import training_directory
from paceline.config import Config
from paceline.types import PacelineError


def config(num_engines: int, per_engine: int = 1, world_size: int = 1, *more: str) -> Config:
    return arena_config(
        [
            f"rollout.num_engines={num_engines}",
            f"rollout.engine.tensor_parallel_size={per_engine}",
            f"learner.world_size={world_size}",
            *more,
        ],
    )


def gpu_nodes(*sizes: int) -> list[Node]:
    return [Node(id=f"node-{i}", num_cpus=64, num_gpus=size) for i, size in enumerate(sizes)]


HEAD = Node(id="head", num_cpus=16, num_gpus=0, has_driver=True)
"""A Ray head without GPUs, where the driver runs."""


def taken(layout: ClusterLayout) -> Counter[str]:
    """GPUs that a layout takes of each node."""
    found: Counter[str] = Counter()
    for bundle in layout.bundles:
        assert bundle.node is not None
        found[bundle.node] += bundle.num_gpus
    return found


def places(layout: ClusterLayout, indices: tuple[int, ...]) -> list[str]:
    return [str(layout.bundles[index].node) for index in indices]


def refusal(nodes: list[Node], wanted: Config) -> str:
    with pytest.raises(PacelineError) as caught:
        plan(nodes, wanted)
    return str(caught.value)


def test_one_node_of_eight_is_filled() -> None:
    """Three engines of two GPUs beside a learner of two: an off-by-one would refuse it."""
    (node,) = gpu_nodes(8)
    layout = plan([replace(node, has_driver=True)], config(3, 2, 2))
    assert (layout.device, layout.transport, layout.strategy) == ("gpu", "distributed", "PACK")
    assert [layout.bundles[index].num_gpus for index in layout.engines] == [2, 2, 2]
    assert [layout.bundles[index].num_gpus for index in layout.ranks] == [1, 1]
    assert sorted((*layout.engines, *layout.ranks)) == list(range(5)), "nothing shares a bundle"
    assert taken(layout) == {"node-0": 8}
    assert layout.training_hosts == {0, 1, 2}


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        (["rollout.engine.weights=fp8"], r"rollout\.engine\.weights: got 'fp8' on a GPU; must be 'full' .*UE8M0"),
        (
            ["rollout.engine.kv_cache=fp8"],
            r"rollout\.engine\.kv_cache: got 'fp8' on a GPU; must be 'full' .*FlashInfer",
        ),
        (
            ["speculation.drafter={kind='eagle3',path='drafter'}", "speculation.training.mode=idle"],
            r"speculation\.training\.mode: got 'idle' on GPUs; must be 'off' .*paceline draft train",
        ),
    ],
)
def test_fp8_and_drafter_training_are_refused_on_gpus_and_not_on_cpus(setting: list[str], reason: str) -> None:
    """Every engine would be lost: at the first push, or when it wakes beside its trainer."""
    wanted = config(2, 1, 1, *setting)
    with pytest.raises(ValueError, match=reason):
        plan(gpu_nodes(8), wanted)
    assert plan(gpu_nodes(0), wanted).device == "cpu"
    assert plan(gpu_nodes(8), config(2, 1, 1, *setting, "cluster.device=cpu")).device == "cpu"


def test_head_without_gpus_places_everything_on_gpu_nodes() -> None:
    """A decision by the driver's own torch would put the whole run on the CPUs of the head."""
    nodes = [HEAD, *gpu_nodes(*[8] * 16)]
    layout = plan(nodes, config(30, 4, 8))
    assert layout.device == "gpu"
    assert taken(layout) == {f"node-{i}": 8 for i in range(16)}
    assert len(set(places(layout, layout.ranks))) == 1, "FSDP's ranks exchange most, so they stay together"
    assert layout.training_hosts == frozenset(), "training data goes through a directory that the driver reads too"


def test_learner_larger_than_a_node_takes_whole_nodes() -> None:
    """Engines that nibbled at every node would scatter its ranks."""
    layout = plan([HEAD, *gpu_nodes(8, 8, 8, 8)], config(8, 2, 16))
    assert sorted(Counter(places(layout, layout.ranks)).values()) == [8, 8]


def test_large_engines_go_to_the_nodes_that_can_hold_them() -> None:
    """Handed out in the order of nodes, the learner would break up the only node for engines of four."""
    layout = plan(gpu_nodes(8, 2), config(2, 4, 2))
    assert places(layout, layout.engines) == ["node-0", "node-0"]
    assert places(layout, layout.ranks) == ["node-1", "node-1"]


def test_learner_is_split_where_only_that_fits() -> None:
    """Two nodes of three: kept together, a learner of two would leave one engine of two homeless."""
    layout = plan(gpu_nodes(3, 3), config(2, 2, 2))
    assert taken(layout) == {"node-0": 3, "node-1": 3}
    assert sorted(places(layout, layout.engines)) == ["node-0", "node-1"]


def test_driver_on_a_gpu_node_keeps_the_learner_beside_it() -> None:
    """Otherwise a drafter could not be trained, although one node has room for all of it."""
    first, second = gpu_nodes(8, 8)
    layout = plan([first, replace(second, has_driver=True)], config(2, 2, 2))
    assert set(places(layout, layout.ranks)) == {"node-1"}
    assert layout.training_hosts == {0, 1}


def test_too_few_gpus_are_counted_and_the_nearest_settings_named() -> None:
    """An error that only says "no room" leaves the user to guess what to change."""
    message = refusal([HEAD, *gpu_nodes(8)], config(4, 2, 2))
    assert "needs 10 GPUs (4 engines x 2 + learner 2); the cluster has 8;" in message
    assert "set rollout.num_engines=3, or add nodes" in message
    assert "set rollout.num_engines=3 or learner.world_size=4" in refusal(gpu_nodes(8), config(4, 1, 5))
    assert plan(gpu_nodes(8), config(3, 2, 2)).device == "gpu", "what it proposes does fit"


def test_one_gpu_is_too_few_for_any_setting() -> None:
    message = refusal(gpu_nodes(1), config(1))
    assert "needs 2 GPUs (1 engines x 1 + learner 1); the cluster has 1;" in message
    assert "one engine and one rank need 2" in message and "cluster.device=cpu" in message


def test_engine_larger_than_every_node_names_the_largest_that_fits() -> None:
    """Sixteen GPUs on eight nodes are enough in number for one engine of four, and no node can hold it."""
    message = refusal(gpu_nodes(*[2] * 8), config(1, 4, 1))
    assert message.startswith("rollout.engine.tensor_parallel_size: got 4; must be at most 2")


def test_scattered_gpus_are_listed() -> None:
    """Nine free GPUs, and yet two engines of four do not fit: the total alone would look like a mistake."""
    message = refusal(gpu_nodes(5, 2, 2), config(2, 4, 1))
    assert "1 x (5 GPUs, 64 CPUs), 2 x (2 GPUs, 64 CPUs), where they do not fit" in message
    assert "set rollout.num_engines=1" in message


def test_node_without_cpus_for_its_actors_is_not_used() -> None:
    """Ray would wait for ever: every bundle has a CPU in it."""
    (node,) = gpu_nodes(8)
    message = refusal([replace(node, num_cpus=2)], config(3, 2, 2))
    assert "1 x (8 GPUs, 2 CPUs), where they do not fit" in message


def test_taken_gpus_are_not_planned_with_and_do_not_turn_the_run_to_cpus() -> None:
    """A busy cluster must not silently train on the CPU."""
    busy = [Node(id="a", num_cpus=64, num_gpus=0, taken_gpus=8)]
    assert "the cluster has 0 free, and 8 that other jobs hold" in refusal(busy, config(1))


def test_slices_are_gpus_for_processes_of_one_each() -> None:
    """NCCL takes two slices of a GPU for the same device: weights have to go through the node's memory."""
    sliced = [replace(node, sliced=True) for node in gpu_nodes(4, 7)]
    layout = plan([HEAD, *sliced], config(4))
    assert (layout.device, layout.transport) == ("gpu", "shared_memory")
    assert taken(layout) == {"node-1": 5}, "all on one node"


@pytest.mark.parametrize(
    ("wanted", "key"),
    [(config(2, 2, 1), "rollout.engine.tensor_parallel_size: got 2"), (config(2, 1, 2), "learner.world_size: got 2")],
)
def test_nothing_spans_slices(wanted: Config, key: str) -> None:
    """vLLM and NCCL would fail minutes later, with "Duplicate GPU detected"."""
    sliced = [replace(node, sliced=True) for node in gpu_nodes(7)]
    message = refusal(sliced, wanted)
    assert message.startswith(key) and "must be 1 on MIG slices" in message


def test_whole_gpus_are_preferred_to_slices() -> None:
    """One sliced node in a cluster must not cost the others their wire."""
    first, second = gpu_nodes(7, 8)
    layout = plan([replace(first, sliced=True), second], config(3, 2, 2))
    assert (taken(layout), layout.transport) == ({"node-1": 8}, "distributed")


def test_cpus_only_stay_on_one_node_through_shared_memory() -> None:
    layout = plan([replace(HEAD, num_cpus=4)], config(3))
    assert (layout.device, layout.strategy, layout.transport) == ("cpu", "STRICT_PACK", "shared_memory")
    assert [bundle.resources for bundle in layout.bundles] == [{"CPU": 1.0}] * 4
    assert all(bundle.node is None for bundle in layout.bundles)
    assert layout.training_hosts == {0, 1, 2}


def test_too_few_cpus_on_every_node() -> None:
    """Twice four CPUs are eight, but shared memory does not reach the other node."""
    nodes = [Node(id=name, num_cpus=4, num_gpus=0) for name in "ab"]
    assert "needs 5 CPUs on one node (4 engines + learner 1), and the largest node has 4" in refusal(nodes, config(4))


def test_config_may_ask_for_a_device() -> None:
    nodes = gpu_nodes(8)
    assert plan(nodes, config(2, 1, 1, "cluster.device=cpu")).device == "cpu"
    message = refusal([HEAD], config(2, 1, 1, "cluster.device=gpu"))
    assert message.startswith("cluster.device: got 'gpu', but no node")


def test_rays_tables_are_read() -> None:
    """As Ray 2.60 writes them; a dead node, and a node that its resource view has not reached yet, are among them."""
    table = [
        {"NodeID": "a", "Alive": True, "Resources": {"CPU": 64.0, "GPU": 8.0, "accelerator_type:H100": 1.0}},
        {"NodeID": "b", "Alive": False, "Resources": {}},
        {"NodeID": "c", "Alive": True, "Resources": {"CPU": 4.0, "GPU": 2.0}},
        {"NodeID": "d", "Alive": True, "Resources": {"CPU": 4.0}},
    ]
    free = {"a": {"CPU": 60.0, "GPU": 5.5}, "d": {"CPU": 4.0}}
    assert nodes_from(table, free, driver="d", sliced={"c"}) == [
        Node(id="a", num_cpus=64, num_gpus=5, taken_gpus=3, accelerator="H100"),
        Node(id="c", num_cpus=4, num_gpus=2, sliced=True),
        Node(id="d", num_cpus=4, num_gpus=0, has_driver=True),
    ]


def test_training_directory_of_the_next_run_has_the_name_of_the_last(tmp_path: Path) -> None:
    """Engines load a drafter from it, whose path is part of vLLM's key for compiled code: with a random name every run
    would compile anew. Runs at the same time must not share one."""
    drafter = 'speculation.drafter={kind = "eagle3", path = "d"}'
    trained = config(
        1, 1, 1, drafter, "speculation.training.mode=idle", f"speculation.training.buffer.directory={tmp_path}"
    )
    first, second = training_directory(trained), training_directory(trained)
    assert first is not None and first.is_dir() and first != second
    first.rmdir()
    assert training_directory(trained) == first
    assert training_directory(config(1)) is None
