"""Which device a process uses, and which collective backend and weight transport follow from it."""

from __future__ import annotations

from typing import Literal

import torch

Transport = Literal["shared_memory", "distributed"]
"""How the bytes of a weight push travel: see `paceline.weights`."""


def on_gpu() -> bool:
    """Whether the processes of this machine compute on GPUs. No part of Paceline has been run on one yet."""
    return torch.cuda.is_available()


def use_device(rank: int = 0) -> torch.device:
    """The device of one rank, made the process's current device."""
    if not on_gpu():
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def finish_work(device: torch.device) -> None:
    """Wait until everything that was queued on the device is done, on all of its streams; nothing to do on the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def collective_backend(device: torch.device) -> Literal["nccl", "gloo"]:
    """torch.distributed's backend for tensors on this device."""
    return "nccl" if device.type == "cuda" else "gloo"


def weight_transport() -> Transport:
    """GPUs hand their weights over by broadcasts; processes on the CPU share the memory of their machine."""
    return "distributed" if on_gpu() else "shared_memory"
