"""The test martingales: right samplers raise no alarm more often than promised, wrong ones do, whatever is scored."""

from __future__ import annotations

import math

import numpy as np
import pytest

from paceline.monitor import ALPHA, BETS, CAP, TESTS, Martingale, group_evidence, limit_log10, log_factors, ratios_of

VOCABULARY = 8


def zipf() -> np.ndarray:
    p = 1 / np.arange(1, VOCABULARY + 1)
    return p / p.sum()


def test_alpha_is_split_over_all_lives_and_tests() -> None:
    """A run whose engines restart for ever would else raise a false alarm at some time."""
    spent = sum(10.0 ** -limit_log10(life) for life in range(1, 100_000))
    assert 0.99 * ALPHA < len(TESTS) * spent <= ALPHA * (1 + 1e-9)


def test_expected_factor_is_at_most_one() -> None:
    p, rng = zipf(), np.random.default_rng(0)
    for _ in range(50):
        q = rng.dirichlet(np.full(VOCABULARY, 0.2))
        expected_E = p @ np.exp(log_factors(q / p))
        assert (expected_E <= 1 + 1e-12).all()


def test_right_sampler_exceeds_a_limit_no_more_often_than_allowed() -> None:
    """400 runs of 2,000 tokens, with a look after each: at most 10 % may exceed 10. By chance more than 65 of 400 do
    with a probability of 4e-5."""
    p, rng = zipf(), np.random.default_rng(1)
    q = rng.dirichlet(np.full(VOCABULARY, 0.5))
    exceeded = 0
    for _ in range(400):
        martingale = Martingale.new()
        martingale.add((q / p)[rng.choice(VOCABULARY, 2000, p=p)])
        exceeded += martingale.log10 > 1
    assert exceeded <= 65


def test_sampler_that_leans_toward_the_drafter_is_found() -> None:
    p, rng = zipf(), np.random.default_rng(2)
    q = rng.dirichlet(np.full(VOCABULARY, 0.5))
    martingale = Martingale.new()
    martingale.add((q / p)[rng.choice(VOCABULARY, 5000, p=0.8 * p + 0.2 * q)])
    assert martingale.log10 > limit_log10(1)
    martingale.add(np.zeros(5000))
    assert martingale.log10 > limit_log10(1), "an alarm is for life"


def test_one_impossible_token_raises_no_alarm_and_a_few_do() -> None:
    """A GPU's rounding may emit a token of vanishing probability once in a long run."""
    martingale = Martingale.new()
    martingale.add(np.full(1, np.inf))
    assert martingale.log10 < limit_log10(1)
    martingale.add(np.full(3, 1e30))
    assert martingale.log10 > limit_log10(1)


def test_logps_that_are_no_numbers_are_evidence_against_their_engine_only() -> None:
    engine = np.array([np.nan, -np.inf, -1.0, -1.0, -1.0], np.float32)
    learner = np.array([-1.0, -1.0, np.nan, -np.inf, -1.0], np.float32)
    assert ratios_of(engine, learner).tolist() == [CAP, CAP, 1.0, 0.0, 1.0]


def test_groups_can_be_selected_by_their_tokens() -> None:
    """Only groups with different rewards are scored. Here only groups that look like evidence are: the worst case. A
    product over scored groups alone would grow without bound."""
    rng, num_groups = np.random.default_rng(3), 2000
    ratio_GN = np.exp(rng.normal(-0.125, 0.5, (num_groups, 10)))  # mean 1
    log_G = group_evidence(ratio_GN.ravel(), np.repeat(np.arange(num_groups), 10), num_groups)
    best = log_G[log_G > 0]
    assert best.sum() / math.log(10) > limit_log10(1), "the case must tempt"
    martingale = Martingale.new()
    for log_evidence in log_G:
        scored = log_evidence > 0
        martingale.add_groups([log_evidence] if scored else [], int(not scored))
    assert martingale.log10 < 2


def test_group_evidence_is_the_mean_of_products() -> None:
    ratio_N, group_N = np.array([2.0, 0.5, 3.0]), np.array([0, 1, 0])
    expected = [np.mean([(1 + e * 1) * (1 + e * 2) for e in BETS]), np.mean([1 - e * 0.5 for e in BETS])]
    np.testing.assert_allclose(np.exp(group_evidence(ratio_N, group_N, 2)), expected)


@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_logps_of_other_tokens_are_found(shift: float) -> None:
    p, rng = zipf(), np.random.default_rng(4)
    martingale = Martingale.new()
    for _ in range(20):
        logp_N = np.log(rng.choice(p, 50, p=p)).astype(np.float32)
        ratio_N = ratios_of(np.roll(logp_N, int(shift)), logp_N)
        martingale.add_groups(group_evidence(ratio_N, np.zeros(50, np.int64), 1), 1)
    assert (martingale.log10 > limit_log10(1)) == bool(shift)
