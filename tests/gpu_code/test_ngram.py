"""n-gram drafts on V2, which has a speculator of its own for them."""

from __future__ import annotations

from driven_engine import DrivenEngine, furthest, reference

PROMPTS = ((5, 6, 7, 5, 6, 7, 5, 6), (9, 9, 9, 9, 9), (3, 12, 4, 3, 12, 4, 3))


def test_greedy_rollouts_are_the_policys_argmax_and_drafts_are_counted(ngram: DrivenEngine) -> None:
    """A draft that is accepted though the policy says otherwise changes greedy output first; and counters that stay 0
    on V2 would blind the selector."""
    assert ngram.async_scheduling is False, "vLLM schedules n-gram drafts synchronously"
    before = ngram.metrics()
    rollouts = ngram.sample(PROMPTS, max_tokens=12, temperature=0.0)
    for expected in reference(ngram.path, ngram.weights(), rollouts):
        assert (expected.largest - expected.logp).max() < 1e-4
    drafted, accepted = (
        ngram.metrics()[key] - before[key] for key in ("engine/drafted_tokens", "engine/accepted_tokens")
    )
    assert drafted == sum(rollout.num_drafted for rollout in rollouts) > 0
    assert accepted == sum(rollout.num_accepted for rollout in rollouts)
    assert ngram.metrics()["selector/steps_at_k3"] > 0


def test_sampled_logp_is_that_of_transformers(ngram: DrivenEngine) -> None:
    """V2 computes log-probabilities of verified tokens in its rejection sampler, in another place than plain ones."""
    rollouts = ngram.sample(PROMPTS, max_tokens=10)
    assert furthest(rollouts, reference(ngram.path, ngram.weights(), rollouts)) < 1e-4


def test_draft_limit_0_stops_drafting(ngram: DrivenEngine) -> None:
    """The controller switches speculation off with it; on V2 the length goes another way to the drafter."""
    ngram.run(ngram.engine.set_draft_limit(0))
    try:
        rollouts = ngram.sample(PROMPTS, max_tokens=6)
        assert sum(rollout.num_drafted for rollout in rollouts) == 0
    finally:
        ngram.run(ngram.engine.set_draft_limit(None))
