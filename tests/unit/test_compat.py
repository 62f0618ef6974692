"""What compat says about the installed vLLM, and that it would say otherwise of another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.rollout import compat, plugin

pytest.importorskip("vllm", reason="asks the installed vLLM")


def right_expand(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """What vLLM's expand_batch_to_tokens promises."""
    lengths = torch.diff(cu_num_tokens, prepend=torch.zeros(1, dtype=cu_num_tokens.dtype))
    return torch.where(x == replace_from, torch.tensor(float(replace_to)), x).repeat_interleave(lengths)


def test_probe_sees_the_fault_of_the_cpu_sampler() -> None:
    """Fails once vLLM issue 55005 is fixed: then the refusal (and the shim, if there is one) can go."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("the fault is in the CPU backend")
    assert not compat.sampler_is_sound()


def test_probe_accepts_a_right_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe that always says no would forbid speculation for ever."""
    monkeypatch.setattr("vllm.v1.sample.rejection_sampler.expand_batch_to_tokens", right_expand)
    assert compat.sampler_is_sound()
    compat.refuse_unsound_speculation({"method": "ngram"})


def test_speculation_is_refused_while_the_sampler_is_unsound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples from a wrong distribution would train the policy on something that it did not say."""
    monkeypatch.setattr(compat, "sampler_is_sound", lambda: False)
    compat.refuse_unsound_speculation(None)
    with pytest.raises(ValueError, match="55005"):
        compat.refuse_unsound_speculation({"method": "ngram"})


@pytest.mark.parametrize("version", ["0.30.0", "0.31.2", "0.32.0", "0.32.1rc1+cpu"])
def test_supported_version_is_accepted(version: str) -> None:
    compat.check_version(version)


@pytest.mark.parametrize("version", ["0.29.9", "0.33.0", "1.30.0", "0.9.1"])
def test_other_version_is_refused(version: str) -> None:
    """Compared as numbers: as text, 0.9 would be newer than 0.30."""
    with pytest.raises(ValueError, match=r"must be 0\.30 to 0\.32"):
        compat.check_version(version)


def test_amx_is_initialised_where_the_cpu_has_it() -> None:
    flags = Path("/proc/cpuinfo").read_text().split()
    assert compat.initialise_amx() == ("amx_tile" in flags)


def test_plugin_can_be_loaded_twice() -> None:
    """vLLM loads plugins in every process, sometimes twice; its factory raises on a name that it knows."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    plugin.register()
    plugin.register()
    assert {"paceline_shm", "paceline_nccl"} <= set(WeightTransferEngineFactory._registry)
