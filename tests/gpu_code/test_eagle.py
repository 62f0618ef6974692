"""EAGLE-3 on V2 under asynchronous scheduling, with a draft length that changes from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.planted import RunningSamplerFault, SamplerFault
from driven_engine import DrivenEngine, furthest, reference
from paceline.certify.lossless import surprise, two_sample
from paceline.drafters.rounds import drafter_weights
from paceline.types import Rollout, Tokens
from paceline.weights.shared_memory import ShmSender

PROMPT = (5, 6, 7, 8)
NUM_ROLLOUTS = 64
MAX_TOKENS = 6
TOLERANCE = 1e-4
FALSE_POSITIVE_RATE = 1e-4
"""False-positive rate of the two-sample test; the z-score's, at 5 deviations, is 6e-7."""


def padded(rollouts: Sequence[Rollout]) -> Tokens:
    ids_NT = np.full((len(rollouts), MAX_TOKENS), -1, np.int32)
    for row, rollout in zip(ids_NT, rollouts, strict=True):
        row[: len(rollout.token_ids)] = rollout.token_ids
    return ids_NT


def test_engine_schedules_asynchronously_and_verifies_with_v2s_sampler(eagle: DrivenEngine) -> None:
    """Otherwise the tests below would say nothing about GPUs."""
    assert eagle.async_scheduling
    (worker,) = eagle.rpc("paceline_sampler")
    assert worker["runner"] == "v2"
    assert worker["sampler"] == "vllm.v1.worker.gpu.spec_decode.rejection_sampler.RejectionSampler"


def test_changing_draft_lengths_leave_the_distribution_as_it_is(eagle: DrivenEngine) -> None:
    """Drafts scheduled ahead of results, verified with the wrong length or with stale draft probabilities, would bend
    the distribution without an error. Two-sample test against the same engine without drafts, and a z-score against
    transformers' exact distribution."""
    before = eagle.metrics()
    drafting = eagle.sample([PROMPT] * NUM_ROLLOUTS, max_tokens=MAX_TOKENS)
    after = eagle.metrics()
    steps = {key: after[key] - before[key] for key in after if key.startswith("selector/steps_at_k")}
    assert sum(count > 0 for count in steps.values()) >= 3, f"the draft length hardly changed: {steps}"
    drafted, accepted = (sum(getattr(r, name) for r in drafting) for name in ("num_drafted", "num_accepted"))
    assert 0.02 < accepted / drafted < 0.98, "only accepted or only rejected drafts test half of the sampler"
    assert after["engine/drafted_tokens"] - before["engine/drafted_tokens"] == drafted

    eagle.run(eagle.engine.set_draft_limit(0))
    plain = eagle.sample([PROMPT] * NUM_ROLLOUTS, max_tokens=MAX_TOKENS)
    eagle.run(eagle.engine.set_draft_limit(None))
    assert sum(rollout.num_drafted for rollout in plain) == 0

    for rollouts in (drafting, plain):
        exact = reference(eagle.path, eagle.weights(), rollouts)
        assert furthest(rollouts, exact) < TOLERANCE
        assert abs(surprise([row.logp for row in exact], [row.entropy for row in exact])) < 5
    found = two_sample([padded(drafting)], [padded(plain)], num_shuffles=19_999)
    assert found.p_value > FALSE_POSITIVE_RATE, found


@pytest.mark.parametrize("fault", ["temperature", "accept"])
def test_fault_planted_in_the_running_sampler_is_found(eagle: DrivenEngine, fault: SamplerFault) -> None:
    """The sampler by itself may be right while the runner hands it the wrong tensors: what an engine says must be
    enough to find that. The z-score of the test above, which the engine passes as it comes."""
    eagle.run(RunningSamplerFault(fault).plant(eagle.engine))
    try:
        rollouts = eagle.sample([PROMPT] * NUM_ROLLOUTS, max_tokens=MAX_TOKENS)
    finally:
        eagle.rpc("plant_sampler_fault", None)
    exact = reference(eagle.path, eagle.weights(), rollouts)
    assert abs(surprise([row.logp for row in exact], [row.entropy for row in exact])) > 5


def test_monitor_accuses_a_faulty_sampler_only(eagle: DrivenEngine) -> None:
    """Rows, steps and request states of V2's tensors that the monitor misread would look like a fault, or hide one. A
    right sampler exceeds 4 with a probability of 2e-4."""
    evidence: dict[SamplerFault | None, float] = {}
    for fault in (None, "temperature", "accept"):
        eagle.rpc("plant_sampler_fault", fault)
        try:
            eagle.sample([PROMPT] * NUM_ROLLOUTS, max_tokens=MAX_TOKENS)
            (found,) = eagle.rpc("sampler_evidence")
        finally:
            eagle.rpc("plant_sampler_fault", None)
        assert found["monitor/failures"] == found["monitor/not_finite"] == 0
        assert found["monitor/positions"] > NUM_ROLLOUTS
        evidence[fault] = max(found["monitor/draft_log10"], found["monitor/residual_log10"])
    assert evidence[None] < 4 < min(evidence["temperature"], evidence["accept"]), evidence


def test_pushed_drafter_is_held_and_leaves_the_policy_alone(eagle: DrivenEngine, drafter_path: Path) -> None:
    """V2 keeps its drafter as `speculator`, not as `drafter`: a push could find none, or land in the policy."""
    stored = drafter_weights(drafter_path / "model.safetensors")
    # Equal logits for every token: an even guess.
    even = {name: torch.zeros_like(x) if x.is_floating_point() and x.ndim == 2 else x for name, x in stored.items()}
    sender = ShmSender()
    try:
        for version, weights in enumerate((even, stored), start=1):
            push = sender.stage(version, weights.items(), target="drafter")
            receipt = eagle.run(eagle.engine.receive(push))
            assert receipt.ok, receipt.error
            (held,) = eagle.rpc("applied_fingerprints")
            assert held["drafter"]["fingerprints"] == push.fingerprints_of(0)
            rollouts = eagle.sample([PROMPT] * 8, max_tokens=MAX_TOKENS)
            assert sum(rollout.num_drafted for rollout in rollouts) > 0
            assert furthest(rollouts, reference(eagle.path, eagle.weights(), rollouts)) < TOLERANCE
    finally:
        sender.close()
    assert eagle.engine.policy_version == 0, "a drafter is no policy"
