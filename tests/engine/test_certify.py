"""certify over the real vLLM: its sampler passes with the shim, and it and its engine fail as they come on the CPU.

That an engine with the shim passes is shown where the command is run: test_commands.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import vllm.plugins
from vllm.v1.sample import rejection_sampler as vllm_sampler

from benchmarks.planted import SamplerFault, plant
from contexts import make_context
from paceline.certify.engines import certify
from paceline.certify.lossless import DEVIATIONS, Sampler, SamplerCell, examine
from paceline.certify.subject import QUICK as EFFORT
from paceline.certify.subject import Fault
from paceline.config import Config
from paceline.rollout.internals import rejection_sampler as sampler
from paceline.rollout.internals import sampler_fix
from paceline.types import Prompt

STOCK = vllm_sampler.expand_batch_to_tokens
"""As vLLM brings it: modules are imported before any test runs, and the first engine of this process mends it."""


@pytest.fixture
def stock(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's sampler as it comes, with the plugins that mend it not loaded yet; all is what it was after the test."""
    monkeypatch.setattr(vllm.plugins, "plugins_loaded", False)
    monkeypatch.setenv("VLLM_PLUGINS", "paceline,paceline_sampler")
    monkeypatch.setattr(vllm_sampler, "expand_batch_to_tokens", STOCK)


@pytest.fixture
def mended(stock: None) -> None:
    sampler_fix.mend_sampler()


def worst(sample: Sampler, num_rows: int) -> float:
    cells: list[SamplerCell] = list(examine(sample, sampler.draft, num_rows=num_rows, lengths=(3,), seed=2))
    return max(cell.excess for cell in cells)


def test_mended_sampler_draws_from_the_policy(mended: None) -> None:
    assert worst(sampler.rejection_sample, 4000) < 5


def test_stock_sampler_of_the_cpu_is_found_wrong(stock: None) -> None:
    """vLLM issue 55005. Where the fault is gone, so is this test."""
    if sampler_fix.sampler_is_sound():
        pytest.skip("this vLLM's sampler is sound")
    assert worst(sampler.rejection_sample, 2000) > DEVIATIONS


@pytest.mark.parametrize("fault", ["residual", "temperature", "stale"])
def test_fault_planted_in_the_real_sampler_is_found(mended: None, fault: SamplerFault) -> None:
    assert worst(plant(sampler.rejection_sample, fault), 2000) > DEVIATIONS


def prompts() -> list[Prompt]:
    """Loops of a few tokens, which an n-gram drafter goes on with."""
    loops = ([7, 8, 9, 10], [20, 21, 22], [40, 41, 42, 43, 44])
    return [
        Prompt(id=f"loop/{which}", text="", token_ids=np.array(loop * 6, np.int32), row={})
        for which, loop in enumerate(loops)
    ]


def config() -> Config:
    speculation = {
        "drafter": {"kind": "ngram"},
        "max_draft_length": 2,
        "selector": {"kind": "fixed", "draft_length": 2},
    }
    engine = {"dtype": "bfloat16", "max_model_len": 256, "max_num_seqs": 32, "kv_cache_gb": 0.05}
    return Config.model_validate(
        {
            "policy": {"model": "arena:small"},
            "rollout": {"engine": engine, "temperature": 0.7},
            "speculation": speculation,
        }
    )


def test_stock_engine_is_found_wrong(policy_path: Path, stock: None) -> None:
    """The proof that certifying an engine bites: nothing but the shim is missing."""
    if sampler_fix.sampler_is_sound():
        pytest.skip("this vLLM's sampler is sound")
    result = certify(
        policy_path,
        prompts(),
        config(),
        context=make_context(),
        effort=replace(EFFORT, samples_per_prompt=256),
        without_shim=True,
    )
    # How wrong its draws are depends on what lies in memory; a sample this large tells them from the policy's in any
    # case.
    assert {"sampler_worst_excess", "two_sample_p"} <= set(result.details["failed"])
    assert result.details["verdict"] == "NOT LOSSLESS"


def test_shifted_log_probabilities_are_found(policy_path: Path, mended: None) -> None:
    fault = Fault(name="logp-shift", about="log-probabilities are shifted by one token", shifts_logp=True)
    result = certify(policy_path, prompts(), config(), context=make_context(), effort=EFFORT, fault=fault)
    assert {"logp_max_abs_accepted", "logp_max_abs_recovered"} <= set(result.details["failed"])
