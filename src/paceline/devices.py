"""Device selection, and the collective backend and weight transport that follow from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from paceline.types import DeviceKind, PacelineError

Transport = Literal["shared_memory", "distributed"]
"""Transport of a weight push: see `paceline.weights`."""


def on_gpu() -> bool:
    """Return whether this process has a GPU. `cluster.layout` decides where a run's processes are placed."""
    return torch.cuda.is_available()


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    """Memory of a visible GPU in bytes."""

    name: str
    free: int
    total: int


def gpu_memory() -> list[GpuMemory]:
    """Return the visible GPUs with their free memory; empty without a GPU."""
    if not on_gpu():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        found.append(GpuMemory(name=torch.cuda.get_device_name(index), free=free, total=total))
    return found


def require(kind: DeviceKind, num_gpus: int = 1) -> None:
    """Raise if this process was given GPUs and cannot use them: it would silently compute on the CPU."""
    found = torch.cuda.device_count() if kind == "gpu" and on_gpu() else 0
    if kind == "gpu" and found < num_gpus:
        raise PacelineError(
            f"cluster.device: this process was given {num_gpus} GPU(s) of its node, and torch {torch.__version__} sees "
            f"{found}; install a build of torch and vLLM for these GPUs there, or set cluster.device=cpu"
        )


def use_device(rank: int = 0, kind: DeviceKind | None = None) -> torch.device:
    """Set and return the current device of a rank. Without `kind`, use a GPU if there is one."""
    if kind is not None:
        require(kind)
    if kind == "cpu" or not on_gpu():
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def finish_work(device: torch.device) -> None:
    """Wait for all streams of a GPU; does nothing on the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def computes_bfloat16(device: torch.device) -> bool:
    """Return whether the device has bfloat16 instructions. CPUs without them train a drafter half as fast in it."""
    if device.type != "cpu":
        return True
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def fast_precision() -> Literal["bfloat16", "float32"]:
    """Return the fastest precision for engines: float32 on CPUs without bfloat16 instructions (3 times as fast)."""
    return "bfloat16" if on_gpu() or computes_bfloat16(torch.device("cpu")) else "float32"


def collective_backend(device: torch.device) -> Literal["nccl", "gloo"]:
    return "nccl" if device.type == "cuda" else "gloo"


def weight_transport(kind: DeviceKind) -> Transport:
    """Return the transport: broadcasts between GPUs, shared memory on the CPU."""
    return "distributed" if kind == "gpu" else "shared_memory"
