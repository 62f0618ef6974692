"""Test martingales for losslessness: alarms with a known error rate, at any time and in runs of any length.

Let x be an emitted token, and p(x) its probability under the policy given the past. For any r with values >= 0 that is
known before x and sums to at most 1 over the support of p, E[r(x) / p(x)] <= 1. So for a bet 0 < e < 1 the product of

    (1 - e) + e * r(x) / p(x)

over tokens is a nonnegative supermartingale that starts at 1, and so is the mean of several bets. By Ville's inequality
it ever exceeds 1 / a with probability at most a. Limiting r / p to CAP keeps this true, and no single token, drawn by
rounding against all odds, raises an alarm. The tests differ in r (q is the drafter's distribution, one-hot at the draft
if it has none):

    draft      q                                   drafts are accepted too often
    residual   max(p - q, 0) / TV(p, q)            drafts are accepted too rarely
    logp       the learner's probabilities         p, as the engine reports it, does not belong to the tokens

`draft` and `residual` read verifications in the engine (rollout/internals/verification_monitor.py). `logp` reads scored
batches. The learner scores some groups only, selected by their rewards and so by x. Hence each group is one bet: with L
the mean of the products over the group's tokens of one engine, wealth is multiplied by (1 - e) + e * L if the group is
scored and by 1 - e if not. As L >= 0, no selection raises the expectation above 1.

ALPHA bounds the false alarms of a run: the tests get a third each, and the n-th engine life (a start of an engine) that
is observed gets 1 / (n (n + 1)) of it, and these sum to 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.types import Floats

Doubles = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

ALPHA = 1e-6
BETS = (0.01, 0.1, 0.5)
CAP = 1e3
LEAST_TV = 1e-6
"""Below this distance of p and q there is no residual to speak of, and `residual` skips the position."""
TESTS = ("draft", "residual", "logp")

# Dimensions: E bets, N tokens, G groups.


def limit_log10(life: int) -> float:
    """Return the evidence, as log10, that raises an alarm of one test in the n-th engine life, from 1."""
    return math.log10(len(TESTS) * life * (life + 1) / ALPHA)


def log_factors(ratio_N: Doubles) -> Doubles:
    """Return log((1 - e) + e * ratio) as an array of tokens and bets."""
    return np.log1p(np.minimum(ratio_N, CAP)[:, None].clip(0.0) * np.array(BETS) - np.array(BETS))


def ratios_of(engine_logp_N: Floats, learner_logp_N: Floats) -> Doubles:
    """Return the learner's probability over the engine's. A right engine never emits a token of probability 0 or
    unknown, so such a token has ratio CAP. If the learner's is NaN, the ratio is 1: that says nothing about the engine.
    """
    engine_N, learner_N = engine_logp_N.astype(np.float64), learner_logp_N.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        ratio_N = np.exp(np.minimum(learner_N - engine_N, math.log(CAP)))
    ratio_N = np.where(np.isnan(learner_N), 1.0, ratio_N)
    return np.where(np.isfinite(engine_N), ratio_N, CAP)


def group_evidence(ratio_N: Doubles, group_N: Ids, num_groups: int) -> Doubles:
    """Return log L of each group: the mean over bets of the product over its tokens."""
    factors_NE = log_factors(ratio_N)
    log_GE = np.zeros((num_groups, len(BETS)))
    for bet in range(len(BETS)):
        log_GE[:, bet] = np.bincount(group_N, factors_NE[:, bet], num_groups)
    return _log_mean_exp(log_GE)


@dataclass(slots=True)
class Martingale:
    """Evidence of one test in one engine life."""

    log_E: Doubles
    peak: float = 0.0
    """Highest log of the mean so far: an alarm is for life."""

    @classmethod
    def new(cls) -> Martingale:
        return cls(np.zeros(len(BETS)))

    @property
    def log10(self) -> float:
        return self.peak / math.log(10)

    def add(self, ratio_N: Doubles) -> None:
        """Bet on tokens in turn, looking after each."""
        if not len(ratio_N):
            return
        path_NE = self.log_E + np.cumsum(log_factors(ratio_N), axis=0)
        self.log_E = path_NE[-1]
        self.peak = max(self.peak, float(_log_mean_exp(path_NE).max()))

    def add_groups(self, log_evidence: Sequence[float] | Doubles, num_unscored: int) -> None:
        """Bet on each group's L, which is 0 for groups that were not scored."""
        bets = np.array(BETS)
        scored_GE = np.logaddexp(np.log1p(-bets), np.log(bets) + np.asarray(log_evidence, np.float64)[:, None])
        self.log_E = self.log_E + scored_GE.sum(0) + num_unscored * np.log1p(-bets)
        self.peak = max(self.peak, float(_log_mean_exp(self.log_E[None])[0]))


def _log_mean_exp(log_NE: Doubles) -> Doubles:
    highest_N = log_NE.max(axis=1)
    return highest_N + np.log(np.exp(log_NE - highest_N[:, None]).mean(axis=1))
