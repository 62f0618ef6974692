"""Generation and policy pushes on V2 without speculation, scheduled asynchronously."""

from __future__ import annotations

import pytest

from driven_engine import V2_CONFIG, DrivenEngine, furthest, reference
from paceline.rollout.arguments import engine_args
from paceline.rollout.internals.model_runner import planned_runner
from paceline.weights.shared_memory import ShmSender

PROMPTS = ((5, 6, 7, 8, 9), (12, 2, 3), tuple(range(2, 15)), (4, 4, 4, 4))
TOLERANCE = 1e-4
"""Largest difference of log-probabilities in float32; other weights differ by more than 0.3."""


def test_engine_runs_the_v2_runner_and_its_sampler(plain: DrivenEngine) -> None:
    """vLLM falls back to V1 with a warning only: all of these tests would then say nothing about GPUs. certify asks
    before it starts an engine, and must get the same answer."""
    assert planned_runner(engine_args(plain.path, V2_CONFIG, 0)) == "v2"
    assert plain.async_scheduling
    (worker,) = plain.rpc("paceline_sampler")
    assert worker == {
        "runner": "v2",
        "sampler": "vllm.v1.worker.gpu.sample.sampler.Sampler",
        "scheduling": "asynchronous",
        "sound": True,
        "verification": "standard",
        "keyed": True,
    }


def test_logp_is_that_of_transformers(plain: DrivenEngine) -> None:
    """Positions, KV cache or log-probabilities that V2 handles otherwise than V1 would bias every policy gradient."""
    rollouts = plain.sample(PROMPTS, max_tokens=10)
    assert furthest(rollouts, reference(plain.path, plain.weights(), rollouts)) < TOLERANCE


def test_logp_is_after_temperature(plain: DrivenEngine) -> None:
    """V2 reads `logprobs_mode` in code of its own."""
    rollouts = plain.sample(PROMPTS[:2], max_tokens=6, temperature=0.7)
    cooled = reference(plain.path, plain.weights(), rollouts, temperature=0.7)
    assert furthest(rollouts, cooled) < TOLERANCE
    assert furthest(rollouts, reference(plain.path, plain.weights(), rollouts)) > 100 * TOLERANCE


def test_pushed_policy_samples_and_a_bad_push_leaves_no_trace(plain: DrivenEngine) -> None:
    """V2 keeps its model and its packed copies elsewhere: fingerprints alone would not see that it samples from old
    weights."""
    sender = ShmSender()
    try:
        new = plain.weights(seed=1)
        push = sender.stage(1, new.items())
        receipt = plain.run(plain.engine.receive(push))
        assert receipt.ok, receipt.error
        (held,) = plain.rpc("applied_fingerprints")
        assert held["policy"]["fingerprints"] == push.fingerprints_of(0)
        rollouts = plain.sample(PROMPTS, max_tokens=8)
        assert {rollout.policy_version for rollout in rollouts} == {1}
        assert furthest(rollouts, reference(plain.path, new, rollouts)) < TOLERANCE
        assert furthest(rollouts, reference(plain.path, plain.weights(), rollouts)) > 0.3

        bad = plain.weights(seed=2)
        del bad["model.layers.1.mlp.up_proj.weight"]
        receipt = plain.run(plain.engine.receive(sender.stage(2, bad.items())))
        assert (receipt.error, receipt.lost) == ("model.layers.1.mlp.up_proj.weight: missing from the push", False)
        assert plain.rpc("applied_fingerprints") == [held]
        assert plain.engine.policy_version == 1

        assert plain.run(plain.engine.receive(sender.stage(3, plain.weights().items()))).ok, "for the tests after this"
    finally:
        sender.close()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_seeded_rollouts_repeat(plain: DrivenEngine, temperature: float) -> None:
    """V2 draws from seeds by Gumbel noise of its own; certify replays rollouts by seed."""
    first, second = (plain.sample(PROMPTS[:1], max_tokens=6, temperature=temperature, seed=3) for _ in range(2))
    assert first[0].token_ids.tolist() == second[0].token_ids.tolist()
