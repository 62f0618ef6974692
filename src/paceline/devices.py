"""Which device a process uses, and which collective backend and weight transport follow from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from paceline.types import DeviceKind, PacelineError

Transport = Literal["shared_memory", "distributed"]
"""How the bytes of a weight push travel: see `paceline.weights`."""


def on_gpu() -> bool:
    """Whether this process has a GPU. No part of Paceline has been run on one yet.

    It says nothing about other machines: where a run's processes are placed, `cluster.layout` decides.
    """
    return torch.cuda.is_available()


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    """One GPU that this process sees; bytes."""

    name: str
    free: int
    total: int


def gpu_memory() -> list[GpuMemory]:
    """The GPUs that this process sees, with the memory that other processes leave; none without a GPU."""
    if not on_gpu():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        found.append(GpuMemory(name=torch.cuda.get_device_name(index), free=free, total=total))
    return found


def require(kind: DeviceKind, num_gpus: int = 1) -> None:
    """Refuse to go on in a process that was given GPUs and cannot use them: it would silently compute on the CPU."""
    found = torch.cuda.device_count() if kind == "gpu" and on_gpu() else 0
    if kind == "gpu" and found < num_gpus:
        raise PacelineError(
            f"cluster.device: this process was given {num_gpus} GPU(s) of its node, and torch {torch.__version__} sees "
            f"{found}; install a build of torch and vLLM for these GPUs there, or set cluster.device=cpu"
        )


def use_device(rank: int = 0, kind: DeviceKind | None = None) -> torch.device:
    """The device of one rank, made the process's current device. `kind` is the run's decision; without one the process
    uses what it has."""
    if kind is not None:
        require(kind)
    if kind == "cpu" or not on_gpu():
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def finish_work(device: torch.device) -> None:
    """Wait until everything that was queued on the device is done, on all of its streams; nothing to do on the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def computes_bfloat16(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 faster than float32. A CPU without instructions for it is half as fast at
    training a drafter in bfloat16."""
    if device.type != "cpu":
        return True
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def fast_precision() -> Literal["bfloat16", "float32"]:
    """The precision in which engines are fastest here: float32 on a CPU that takes some three times as long for
    bfloat16."""
    return "bfloat16" if on_gpu() or computes_bfloat16(torch.device("cpu")) else "float32"


def collective_backend(device: torch.device) -> Literal["nccl", "gloo"]:
    """torch.distributed's backend for tensors on this device."""
    return "nccl" if device.type == "cuda" else "gloo"


def weight_transport(kind: DeviceKind) -> Transport:
    """GPUs hand their weights over by broadcasts; processes on the CPU share the memory of their machine."""
    return "distributed" if kind == "gpu" else "shared_memory"
