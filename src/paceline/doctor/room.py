"""Checks of the room that the policy needs: disk, memory and shared memory."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import psutil
import torch

from paceline.config import LearnedDrafter
from paceline.doctor.check import CheckOutcome, check, failed, passed
from paceline.doctor.inputs import policy
from paceline.doctor.subject import BYTES_TO_UPDATE, Setup
from paceline.rollout.internals.platform import device_type
from paceline.weights.check import TensorSpec, check_push
from paceline.weights.shared_memory import ShmReceiver, ShmSender, free_bytes, segment_bytes

_PART = "room for this policy"
_GB = 1e9


@check(_PART, needs=(policy,), advice="free some space, or put the cache elsewhere: PACELINE_CACHE=/big/disk")
def disk(setup: Setup) -> CheckOutcome:
    """Cache and run directory can be written and have room for checkpoints."""
    needed = 2 * 4 * setup.num_parameters + 10**9
    says = []
    for path in dict.fromkeys((_existing(setup.context.cache_root), _existing(setup.config.run.directory.absolute()))):
        free = shutil.disk_usage(path).free
        says.append(f"{path} {free / _GB:.0f} GB free")
        if free < needed or not os.access(path, os.W_OK):
            return failed(f"{says[-1]}, {needed / _GB:.1f} GB needed, writable: {os.access(path, os.W_OK)}")
    return passed(f"{', '.join(says)}; {needed / _GB:.1f} GB needed for two checkpoints")


def _existing(path: Path) -> Path:
    """The nearest directory that is there."""
    return next(parent for parent in (path, *path.parents) if parent.is_dir())


@check(
    _PART,
    needs=(policy,),
    advice="end other processes, lower rollout.engine.kv_cache_gb, or take a machine with more memory",
)
def host_memory(setup: Setup) -> CheckOutcome:
    """The host has memory for an engine and the learner."""
    needed = 3 * 10**9 + 4 * setup.num_parameters  # the learner loads FP32 before it moves to a GPU
    if device_type() == "cpu":
        needed += setup.engine_config.kv_cache_gb * 2**30 + BYTES_TO_UPDATE * setup.num_parameters
    available = psutil.virtual_memory().available
    says = f"{available / _GB:.1f} GB available, {needed / _GB:.1f} GB needed for an engine and the learner"
    return passed(says) if available >= needed else failed(says)


@check(
    _PART,
    needs=(policy,),
    advice="enlarge /dev/shm: docker run --shm-size=8g, in Kubernetes an emptyDir of medium Memory at /dev/shm",
    otherwise="no room in shared memory",
)
def shared_memory(setup: Setup) -> CheckOutcome:
    """Shared memory has room for a push of the policy and of the drafter."""
    widths = {"float32": 4, "bfloat16": 2}
    needed = segment_bytes(setup.num_parameters * widths[setup.engine_config.dtype])
    speculation = setup.config.speculation
    if speculation is None or isinstance(speculation.drafter, LearnedDrafter):
        needed += segment_bytes(needed // 4)  # a drafter is one layer with the policy's embedding and head
    free = 0 if setup.plant == "shared-memory" else free_bytes()
    says = f"{free / _GB:.2f} GB free, {needed / _GB:.2f} GB needed"
    return passed(says) if free >= needed else failed(says)


@check(
    _PART,
    advice="look for other containers on the same /dev/shm and for a broken mount: mount | grep shm",
    needs=(shared_memory,),
)
def shared_memory_round_trip(setup: Setup) -> CheckOutcome:
    """What is written to shared memory is read back with its fingerprint."""
    sender, receiver = ShmSender(), ShmReceiver()
    try:
        push = sender.stage(1, [("probe", torch.randn(2**20))])
        check_push(push, {"probe": TensorSpec("float32", (2**20,))}, receiver.fetch(push))
    finally:
        receiver.close()
        sender.close()
    return passed(f"{push.num_bytes / 1e6:.1f} MB in segment {push.channel.rpartition('-')[0]}")


CHECKS = (disk, host_memory, shared_memory, shared_memory_round_trip)
