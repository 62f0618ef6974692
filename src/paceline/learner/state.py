"""Save and load the learner's state: parameters, optimizer state, counters and KV scales.

    learner/shard-RANK-*.safetensors    each rank's shards of parameters and AdamW's two moments
            counters.json               updates, optimizer steps and the scales of an FP8 KV cache

torch.distributed.checkpoint writes and reads the shards, so another number of ranks can load them. The format is
safetensors, because the default format pickles an index.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch.distributed is partially typed.

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from paceline.fp8 import KvScales
from paceline.types import PacelineError

_COUNTERS = "counters.json"
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerCounters:
    num_updates: int
    num_steps: int
    kv_scales: KvScales | None


def write_state(
    directory: Path,
    parameters: Mapping[str, torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    counters: LearnerCounters,
) -> None:
    """Write into a new directory that all ranks can access. Collective."""
    if dist.get_rank() == 0:
        directory.mkdir()
        steps = {name: float(state["step"]) for name, state in _states(parameters, optimizer)}
        (directory / _COUNTERS).write_text(
            json.dumps({**asdict(counters), "optimizer_steps": steps}) + "\n", encoding="utf-8"
        )
    dist.barrier()
    writer = HuggingFaceStorageWriter(str(directory), save_distributed=True)
    try:
        save(_tensors(parameters, optimizer), storage_writer=writer)
    except CheckpointException as error:  # a BaseException, which handlers of failures would miss
        raise PacelineError(f"the learner's state cannot be written to {directory}: {error}") from error
    seen = len(list(directory.glob("*.safetensors")))
    if seen != dist.get_world_size():
        raise PacelineError(
            f"run.directory: files of {seen} of {dist.get_world_size()} ranks arrived in {directory}; must be on a "
            "file system that all learner nodes share, or set run.checkpoint_every=0"
        )


def read_state(
    directory: Path, parameters: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer
) -> LearnerCounters:
    """Load parameters and optimizer state written by any number of ranks. Collective."""
    tree = json.loads((directory / _COUNTERS).read_text(encoding="utf-8"))
    steps: dict[str, float] = tree["optimizer_steps"]
    for name, parameter in parameters.items():
        optimizer.state.pop(parameter, None)
        if name in steps:
            optimizer.state[parameter] = {
                "step": torch.tensor(steps[name], dtype=torch.float32, device=parameter.device),
                **{moment: torch.zeros_like(parameter, requires_grad=False) for moment in _MOMENTS},
            }
    try:
        load(_tensors(parameters, optimizer), storage_reader=HuggingFaceStorageReader(str(directory)))
    except CheckpointException as error:
        raise PacelineError(f"the learner's state in {directory} does not fit this policy: {error}") from error
    scales = None if tree["kv_scales"] is None else KvScales.from_dict(tree["kv_scales"])
    return LearnerCounters(num_updates=tree["num_updates"], num_steps=tree["num_steps"], kv_scales=scales)


def _states(
    parameters: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Return optimizer states by parameter name; none before the first step."""
    return ((name, optimizer.state[p]) for name, p in parameters.items() if p in optimizer.state)


def _tensors(parameters: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {f"parameter.{name}": p.detach() for name, p in parameters.items()}
    for name, state in _states(parameters, optimizer):
        tensors |= {f"{moment}.{name}": state[moment] for moment in _MOMENTS}
    return tensors
