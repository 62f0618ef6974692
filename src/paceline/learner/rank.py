"""Set up one learner rank: device, process group and shard of the policy."""

# pyright: reportUnknownMemberType=false
# torch.manual_seed is untyped.

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]  public in its docs
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils import deterministic

from paceline.config import LearnerConfig
from paceline.devices import collective_backend, use_device
from paceline.learner.scoring import TokenScorer
from paceline.types import DeviceKind


def prepare_device(rank: int, seed: int, num_threads: int | None, kind: DeviceKind | None) -> torch.device:
    """Seed the process and select its device."""
    torch.manual_seed(seed)
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    device = use_device(rank, kind)
    if device.type != "cpu":
        return device
    # CPU only: some GPU kernels have no deterministic form and would raise.
    torch.use_deterministic_algorithms(True)
    # Deterministic mode also fills every new tensor with NaN, a slow debugging aid.
    deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    return device


def join_ranks(config: LearnerConfig, rank: int, device: torch.device, store: Store) -> None:
    """Join the process group. The timeout bounds the wait for a dead rank."""
    dist.init_process_group(
        collective_backend(device),
        store=store,
        rank=rank,
        world_size=config.world_size,
        timeout=timedelta(seconds=config.deadline_s),
    )


def shard_policy(scorer: TokenScorer, config: LearnerConfig, device: torch.device) -> list[nn.Module]:
    """Apply FSDP2 to every decoder layer and to the root, and return the layers."""
    mesh = init_device_mesh(device.type, (config.world_size,))
    precision = MixedPrecisionPolicy()
    if config.dtype == "bfloat16":
        # Gradients are reduced in float32 to keep the sum over ranks exact enough.
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layers = scorer.policy.base_model.layers
    assert isinstance(layers, nn.ModuleList)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(scorer, mesh=mesh, mp_policy=precision)
    return list(layers)
