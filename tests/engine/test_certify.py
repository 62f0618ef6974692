"""certify over the real vLLM: its sampler passes with the shim, and it and its engine fail as they come on the CPU.

That an engine with the shim passes is shown where the command is run: test_commands.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import vllm.plugins
from vllm.v1.sample import rejection_sampler as vllm_sampler

from benchmarks.planted import RunningSamplerFault, SamplerFault, plant
from contexts import make_context
from paceline.certify.engines import certify
from paceline.certify.lossless import DEVIATIONS, Sampler, SamplerCell, examine
from paceline.certify.subject import QUICK as EFFORT
from paceline.certify.subject import Fault
from paceline.config import Config
from paceline.rollout.internals import rejection_sampler as sampler
from paceline.rollout.internals import sampler_fix
from paceline.types import Prompt
from random_policy import make_drafter

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


def coupled(drafter: Path) -> Config:
    speculation = {
        "drafter": {"kind": "eagle3", "path": str(drafter)},
        "max_draft_length": 2,
        "verification": "coupled",
    }
    return Config.model_validate(config().model_dump(mode="json") | {"speculation": speculation})


@pytest.fixture(scope="module")
def drafter_path(policy_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_drafter(policy_path, tmp_path_factory.mktemp("drafter") / "eagle3")


def test_coupled_engine_generates_the_tokens_of_plain_decoding(policy_path: Path, drafter_path: Path) -> None:
    """In bfloat16, where rounding depends on the batch: ties are no errors. Preemptions change no token."""
    effort = replace(EFFORT, exact_tokens=1500, exact_length=48, conclusive=True)
    result = certify(policy_path, prompts(), coupled(drafter_path), context=make_context(), effort=effort)
    assert result.details["verdict"] == "LOSSLESS", (result.figures, result.details["missing"])
    assert result.figures["tokens"] >= 1500 and result.figures["differences"] == 0
    assert result.figures["preemptions"] > 0 and result.figures["drafted_tokens"] > 1000


def test_fault_in_a_running_coupled_engine_is_found(policy_path: Path, drafter_path: Path) -> None:
    fault = Fault(name="accept", about="rejected drafts are accepted", engine=RunningSamplerFault("accept"))
    effort = replace(EFFORT, exact_tokens=300, exact_length=24)
    result = certify(policy_path, prompts(), coupled(drafter_path), context=make_context(), effort=effort, fault=fault)
    assert "differences" in result.details["failed"]
    (first, *_) = result.details["differences"]
    assert first["token"] != first["plain_token"] and first["gap"] > result.figures["noise_floor"]
