"""Probes of the installed vLLM: the sampler's fault, its version and AMX."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from paceline.rollout import plugin
from paceline.rollout.internals import sampler_fix
from paceline.rollout.internals import version as versions
from paceline.rollout.internals.platform import initialize_amx

pytest.importorskip("vllm", reason="asks the installed vLLM")


@pytest.fixture
def stock_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own function, put back afterward whatever the test does to it."""
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler

    if not current_platform.is_cpu():
        pytest.skip("the fault is in the CPU backend")
    assert rejection_sampler.expand_batch_to_tokens.__module__ == rejection_sampler.__name__, (
        "an earlier test left the shim in"
    )
    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", rejection_sampler.expand_batch_to_tokens)


@pytest.mark.usefixtures("stock_sampler")
def test_probe_sees_the_fault_of_the_cpu_sampler() -> None:
    """Fails once vLLM issue 55005 is fixed: then the refusal and the shim can go."""
    assert not sampler_fix.sampler_is_sound()


@pytest.mark.usefixtures("stock_sampler")
def test_shim_mends_the_sampler_and_then_leaves_it_alone() -> None:
    """A shim that is put in twice, or over a sound function, would outlive its reason."""
    assert sampler_fix.mend_sampler()
    assert sampler_fix.sampler_is_sound()
    assert not sampler_fix.mend_sampler()


@pytest.mark.usefixtures("stock_sampler")
def test_shim_fails_loudly_when_its_target_has_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replaced function that vLLM no longer calls would leave the fault in and the warning out."""
    monkeypatch.setattr(sampler_fix, "sampler_is_sound", lambda: False)
    with pytest.raises(RuntimeError, match="expand_batch_to_tokens"):
        sampler_fix.mend_sampler()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_shim_replaces_greedy_temperature_only(dtype: torch.dtype) -> None:
    """Temperature 0 becomes 1 before the division; top_k comes as integers and keeps its values."""
    x = torch.tensor([0, 3, 2], dtype=dtype)
    ends = torch.tensor([1, 4, 4], dtype=torch.int32)
    expanded = sampler_fix._expand_batch_to_tokens(x, ends, 4, replace_from=0, replace_to=1)
    assert expanded.dtype == dtype
    assert expanded.tolist() == [1, 3, 3, 3]


@pytest.mark.parametrize("version", ["0.30.0", "0.31.2", "0.32.0", "0.32.1rc1+cpu"])
def test_supported_version_is_accepted(version: str) -> None:
    versions.check_version(version)


@pytest.mark.parametrize("version", ["0.29.9", "0.33.0", "1.30.0", "0.9.1"])
def test_other_version_is_refused(version: str) -> None:
    """Compared as numbers: as text, 0.9 would be newer than 0.30."""
    with pytest.raises(ValueError, match=r"must be 0\.30 to 0\.32"):
        versions.check_version(version)


def test_other_hosts_may_have_an_older_vllm() -> None:
    assert versions.is_known("0.24.0", versions.OLDEST_HOST) and not versions.is_known("0.24.0")
    assert not versions.is_known("0.23.9", versions.OLDEST_HOST)


@pytest.mark.usefixtures("stock_sampler")
def test_sampler_without_dispatchers_is_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.24 to 0.29: until a worker starts, the sampler's kernels are plain functions, which cannot be launched."""
    from vllm.v1.sample import rejection_sampler

    def launch(*args: object) -> None:
        raise TypeError("'function' object is not subscriptable")

    monkeypatch.setitem(sys.modules, "vllm.triton_utils.dispatcher", None)
    monkeypatch.setitem(sys.modules, "vllm.utils.cpu_triton_utils", ModuleType("cpu_triton_utils"))
    monkeypatch.setattr("vllm.utils.cpu_triton_utils", ModuleType("cpu_triton_utils"), raising=False)
    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", launch)
    for name in ("rejection_greedy_sample", "rejection_random_sample", "sample_recovered_tokens"):
        monkeypatch.delattr(rejection_sampler, f"_{name}", raising=False)
    assert sampler_fix.mend_sampler()
    assert sampler_fix.sampler_is_sound()


def test_amx_is_initialized_where_the_cpu_has_it() -> None:
    flags = Path("/proc/cpuinfo").read_text().split()
    assert initialize_amx() == ("amx_tile" in flags)


def test_plugin_can_be_loaded_twice() -> None:
    """vLLM loads plugins in every process, sometimes twice; its factory raises on a name that it knows."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    plugin.register()
    plugin.register()
    assert "paceline" in WeightTransferEngineFactory._registry
