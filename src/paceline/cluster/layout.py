"""Assign the processes of a run to nodes: a pure function of the cluster's resources and the config.

    nodes (ray_session.py) ─┐
                            ├─▶ plan ─▶ ClusterLayout: device, bundles, strategy, wire ─▶ placement.py ─▶ actors
    config ─────────────────┘

The driver's hardware is irrelevant, since the driver may be a head node without GPUs. A bundle holds one actor. Engines
and ranks refer to bundles by index, so that colocated ones can share a bundle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from paceline.config import Config
from paceline.config.gpu import refuse_on_gpu
from paceline.devices import Transport, weight_transport
from paceline.types import DeviceKind, PacelineError


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine in Ray's view."""

    id: str
    num_cpus: int
    num_gpus: int
    """Free GPUs."""
    taken_gpus: int = 0
    """GPUs held by other jobs."""
    accelerator: str | None = None
    """Type of its GPUs, such as H100."""
    sliced: bool = False
    """The GPUs are MIG slices. Ray counts each slice as a whole GPU."""
    has_driver: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """Resources of one actor on one node."""

    num_gpus: int
    node: str | None
    """Id of the node; None leaves the choice to Ray."""

    @property
    def resources(self) -> dict[str, float]:
        """Return Ray's resources: one CPU for the actor, and its GPUs."""
        return {"CPU": 1.0, "GPU": float(self.num_gpus)} if self.num_gpus else {"CPU": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterLayout:
    """Devices and nodes of all processes of a run."""

    device: DeviceKind
    bundles: tuple[Bundle, ...]
    engines: tuple[int, ...]
    """Index of each engine's bundle."""
    ranks: tuple[int, ...]
    """Index of each learner rank's bundle."""
    training_hosts: frozenset[int]
    """Engines that can host drafter training. Data and rounds go through a directory, so these engines share a node
    with the whole learner and the driver."""
    strategy: Literal["PACK", "STRICT_PACK"]
    transport: Transport


def plan(nodes: Sequence[Node], config: Config) -> ClusterLayout:
    """Place every process. Raise PacelineError if resources are missing, ValueError if GPUs cannot run the config."""
    has_gpus = any(node.num_gpus + node.taken_gpus for node in nodes)
    if config.cluster.device == "gpu" and not has_gpus:
        raise PacelineError(
            "cluster.device: got 'gpu', but no node of the Ray cluster has one (see `ray status`); add "
            "GPU nodes, or set cluster.device=cpu"
        )
    if not has_gpus or config.cluster.device == "cpu":
        return _on_cpus(nodes, config)
    refuse_on_gpu(config)
    return _on_gpus(nodes, config)


def nodes_from(
    table: Sequence[Mapping[str, Any]],
    free: Mapping[str, Mapping[str, float]],
    *,
    driver: str,
    sliced: Collection[str] = (),
) -> list[Node]:
    """Return the nodes in Ray's node table (`ray.nodes()`), with free resources by node id.

    A new node may be missing in `free`, and is entirely free then. Ray counts a MIG slice as a GPU, so `sliced` names
    the nodes with slices. Fractions of a GPU are unusable.
    """
    nodes = []
    for entry in table:
        if not entry["Alive"]:
            continue
        total, node_id = entry["Resources"], str(entry["NodeID"])
        num_gpus, left = int(total.get("GPU", 0)), int(free.get(node_id, total).get("GPU", 0))
        types = [name.partition(":")[2] for name in total if name.startswith("accelerator_type:")]
        nodes.append(
            Node(
                id=node_id,
                num_cpus=int(total.get("CPU", 0)),
                num_gpus=left,
                taken_gpus=num_gpus - left,
                accelerator=types[0] if types else None,
                sliced=node_id in sliced,
                has_driver=node_id == driver,
            )
        )
    return nodes


def _on_cpus(nodes: Sequence[Node], config: Config) -> ClusterLayout:
    """Place all processes on one node of Ray's choice, because weights go through shared memory."""
    num_engines, world_size = config.rollout.num_engines, config.learner.world_size
    needed, largest = num_engines + world_size, max((node.num_cpus for node in nodes), default=0)
    if needed > largest:
        raise PacelineError(
            f"cluster: the run needs {needed} CPUs on one node ({num_engines} engines + learner {world_size}), "
            f"and the largest node has {largest}; lower rollout.num_engines or learner.world_size, or start Ray "
            "there with a larger --num-cpus"
        )
    return ClusterLayout(
        device="cpu",
        bundles=(Bundle(num_gpus=0, node=None),) * needed,
        engines=tuple(range(num_engines)),
        ranks=tuple(range(num_engines, needed)),
        training_hosts=frozenset(range(num_engines)),
        strategy="STRICT_PACK",
        transport=weight_transport("cpu"),
    )


def _on_gpus(nodes: Sequence[Node], config: Config) -> ClusterLayout:
    """Choose whole GPUs if they suffice, otherwise the slices of one node."""
    need = _Need(
        per_engine=config.rollout.engine.tensor_parallel_size,
        num_engines=config.rollout.num_engines,
        world_size=config.learner.world_size,
    )
    found, transport = _fit([node for node in nodes if not node.sliced], need), weight_transport("gpu")
    # A process can use one slice only, and NCCL treats slices of one GPU as the same GPU. So no process group spans
    # slices, and weights go through shared memory.
    if found is None and need.per_engine == need.world_size == 1:
        slices = sorted((node for node in nodes if node.sliced), key=lambda node: node.num_gpus)
        found, transport = next(filter(None, (_fit([node], need) for node in slices)), None), "shared_memory"
    if found is None:
        raise PacelineError(_shortage(nodes, need))
    engines, ranks = found
    driver = {node.id for node in nodes if node.has_driver}
    return ClusterLayout(
        device="gpu",
        bundles=(
            *(Bundle(num_gpus=need.per_engine, node=node) for node in engines),
            *(Bundle(num_gpus=1, node=node) for node in ranks),
        ),
        engines=tuple(range(len(engines))),
        ranks=tuple(range(len(engines), len(engines) + len(ranks))),
        training_hosts=frozenset(index for index, node in enumerate(engines) if {node} == set(ranks) == driver),
        strategy="PACK",
        transport=transport,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Need:
    per_engine: int
    num_engines: int
    world_size: int

    @property
    def num_gpus(self) -> int:
        return self.num_engines * self.per_engine + self.world_size

    @property
    def text(self) -> str:
        return f"{self.num_engines} engines x {self.per_engine} + learner {self.world_size}"


class _Room:
    """Remaining resources of each node during placement."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._left = {node.id: (node.num_gpus, node.num_cpus) for node in nodes}

    def holding(self, num_bundles: int, num_gpus: int) -> list[str]:
        """Return nodes with room for these bundles, the fullest first, to keep large gaps for later."""
        fitting = [
            (left, node)
            for node, (left, cpus) in self._left.items()
            if left >= num_bundles * num_gpus and cpus >= num_bundles
        ]
        return [node for _, node in sorted(fitting, key=lambda item: item[0])]

    def take(self, node: str, num_bundles: int, num_gpus: int) -> list[str]:
        left, cpus = self._left[node]
        self._left[node] = (left - num_bundles * num_gpus, cpus - num_bundles)
        return [node] * num_bundles

    def place_engines(self, need: _Need) -> list[str] | None:
        """Return a node for each engine, which holds all its GPUs."""
        placed: list[str] = []
        for _ in range(need.num_engines):
            nodes = self.holding(1, need.per_engine)
            if not nodes:
                return None
            placed += self.take(nodes[0], 1, need.per_engine)
        return placed

    def place_ranks(self, need: _Need) -> list[str] | None:
        """Return a node for each rank, on as few nodes as possible."""
        placed: list[str] = []
        while len(placed) < need.world_size:
            nodes = self.holding(1, 1)
            if not nodes:
                return None
            emptiest = nodes[-1]
            placed += self.take(emptiest, min(need.world_size - len(placed), *self._left[emptiest]), 1)
        return placed


def _fit(nodes: Sequence[Node], need: _Need) -> tuple[list[str], list[str]] | None:
    """Return nodes of engines and ranks, or None if they do not fit. The learner is on one node if possible, preferably
    the driver's, since its ranks communicate most."""
    driver = {node.id for node in nodes if node.has_driver}
    for home in sorted(_Room(nodes).holding(need.world_size, 1), key=lambda node: node not in driver):
        room = _Room(nodes)
        ranks = room.take(home, need.world_size, 1)
        if (engines := room.place_engines(need)) is not None:
            return engines, ranks
    room = _Room(nodes)
    if (engines := room.place_engines(need)) is None or (ranks := room.place_ranks(need)) is None:
        return None
    return engines, ranks


def _shortage(nodes: Sequence[Node], need: _Need) -> str:
    """Return the missing resources and the nearest settings that fit."""
    whole = [node for node in nodes if node.num_gpus and not node.sliced]
    slices = sum(node.num_gpus for node in nodes if node.sliced)
    have, largest = sum(node.num_gpus for node in whole), max((node.num_gpus for node in whole), default=0)
    if slices and need.per_engine > 1 and need.per_engine > largest:
        return (
            f"rollout.engine.tensor_parallel_size: got {need.per_engine}; must be 1 on MIG slices, because a process "
            "can use only one slice"
        )
    if slices and need.world_size > 1 and need.world_size > have:
        return (
            f"learner.world_size: got {need.world_size}; must be 1 on MIG slices, because NCCL takes slices of one GPU "
            "for the same GPU"
        )
    if whole and need.per_engine > largest:
        return (
            f"rollout.engine.tensor_parallel_size: got {need.per_engine}; must be at most {largest}, because all GPUs "
            "of an engine are on one node and no node has more free"
        )
    taken = sum(node.taken_gpus for node in nodes)
    found = f"the cluster has {have}" + (f" free, and {taken} that other jobs hold" if taken else "")
    if slices:
        found += f", and {slices} MIG slices, but one run uses slices of one node only, without other GPUs"
    if have >= need.num_gpus:
        sizes = Counter((node.num_gpus, node.num_cpus) for node in whole)
        listed = ", ".join(
            f"{count} x ({gpus} GPUs, {cpus} CPUs)" for (gpus, cpus), count in sorted(sizes.items(), reverse=True)
        )
        found += (
            f" on nodes of {listed}, where they do not fit: all GPUs of an engine are on one node, and every engine "
            "and rank takes a CPU"
        )
    return f"cluster: the run needs {need.num_gpus} GPUs ({need.text}); {found}; {_remedy(nodes, need)}"


def _remedy(nodes: Sequence[Node], need: _Need) -> str:
    whole = [node for node in nodes if not node.sliced]
    settings = []
    for key, field, asked in (
        ("rollout.num_engines", "num_engines", need.num_engines),
        ("learner.world_size", "world_size", need.world_size),
    ):
        fitting = (size for size in range(asked - 1, 0, -1) if _fit(whole, replace(need, **{field: size})) is not None)
        if (size := next(fitting, None)) is not None:
            settings.append(f"{key}={size}")
    if settings:
        return f"set {' or '.join(settings)}, or add nodes"
    return (
        f"one engine and one rank need {need.per_engine + 1}, because engines and learner do not share GPUs yet; add "
        "GPUs, or set cluster.device=cpu"
    )
