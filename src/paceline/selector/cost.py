"""Learns from the engine's steps what a step costs and how many tokens a draft of length k yields.

The selector needs one number, the tokens per second that the engine settles at with draft length k on a batch of B
requests:

    rate(B, k) = B * (1 + sum_{j<=k} S_j) / T(B, verified=k, drafted=k)          S_j = h_1 * ... * h_j

**Step time T** is that of `step_time.py`.

**Yield S.** h_j is the probability that position j is accepted if all before it were. A position that was not proposed
counts as not accepted, so the sum above is also right for a drafter that proposes less than it was asked for. Counts
are pooled over batch sizes and forgotten slowly; a short memory beside the long one notices a drafter or policy that
has changed, and then both start again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.selector.cost_file import Costs
from paceline.selector.step_time import Array, StepTime

LONG_MEMORY = 1 - 1 / 200
SHORT_MEMORY = 1 - 1 / 16
"""Share of the acceptance counts that remains after a step."""
SURPRISE = 4.0
"""Standard deviations between the short and the long memory at which the long one is given up."""
PRIOR_ACCEPTANCE = 0.5
PRIOR_TRIALS = 2.0
NEIGHBOUR_TRIALS = 8.0
"""Weight of the position before in the estimate of a position, in requests. Few are still in the draft at its end, and
four that all failed there once must not keep it from being tried again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What the scheduler saw of one engine step."""

    num_requests: int
    num_prefill_tokens: int
    """Prompt tokens computed in it; 0 is pure decoding. Steps with prefill teach acceptance, not cost."""
    context_tokens: int
    """Sum of the requests' context lengths."""
    verified: int
    """Draft length that was verified in this step, chosen one step earlier; 0 is none."""
    drafted: int
    """Draft length asked of the drafter in this step, to be verified in the next."""
    seconds: float
    proposed_at: tuple[int, ...]
    """[j] = requests that had a draft token at position j; model-free drafters may propose fewer than asked."""
    accepted_at: tuple[int, ...]
    """[j] = how many of these had position j accepted."""
    num_emitted: int

    @property
    def num_verifications(self) -> int:
        """Requests that had a draft to verify."""
        return self.proposed_at[0] if self.proposed_at else 0

    @property
    def num_accepted(self) -> int:
        """Draft tokens that were accepted."""
        return sum(self.accepted_at)


class Acceptance:
    """Acceptance counts by draft position, in a long and a short memory."""

    def __init__(self, max_draft_length: int) -> None:
        self.max_draft_length = max_draft_length
        self.num_changes = 0
        # Requests that had all positions before this one accepted, when it was asked for.
        self._trials = [0.0] * max_draft_length
        self._accepted = [0.0] * max_draft_length
        self._recent_trials = [0.0] * max_draft_length
        self._recent_accepted = [0.0] * max_draft_length
        self._asked = [0.0] * max_draft_length  # requests of steps in which the position was asked for
        self._proposed = [0.0] * max_draft_length
        self._gap = 0  # steps without drafts since the last with some: time passes for what is remembered
        self._is_fresh = False
        self.refresh()

    @property
    def reach(self) -> int:
        """Number of positions that were tried often enough to be known."""
        return next((j for j, trials in enumerate(self._trials) if trials < 4), self.max_draft_length)

    def observe(self, step: Step) -> None:
        verified = min(step.verified, self.max_draft_length)
        self._gap += 1
        if verified <= 0:
            return
        short = SHORT_MEMORY**self._gap
        self._gap = 0
        proposed_at = step.proposed_at[:verified] + (0,) * (verified - len(step.proposed_at))
        accepted_at = step.accepted_at[:verified] + (0,) * (verified - len(step.accepted_at))
        # Requests in prefill could not have had a draft, and how many they are is not told.
        requests = proposed_at[0] / max(self.coverage[0], 0.05) if step.num_prefill_tokens else float(step.num_requests)
        survivors = requests
        for j in range(verified):
            self._trials[j] = LONG_MEMORY * self._trials[j] + survivors
            self._accepted[j] = LONG_MEMORY * self._accepted[j] + accepted_at[j]
            self._recent_trials[j] = short * self._recent_trials[j] + survivors
            self._recent_accepted[j] = short * self._recent_accepted[j] + accepted_at[j]
            self._asked[j] = LONG_MEMORY * self._asked[j] + requests
            self._proposed[j] = LONG_MEMORY * self._proposed[j] + proposed_at[j]
            survivors = float(accepted_at[j])
        self._age(verified, short)
        if self._has_changed(verified):
            self._start_again(requests, accepted_at)
        self._is_fresh = False

    def _age(self, first: int, short: float) -> None:
        """Forget also what is known of positions that are not asked for: nothing else would ever correct it."""
        for counts in (self._trials, self._accepted, self._asked, self._proposed):
            counts[first:] = [LONG_MEMORY * count for count in counts[first:]]
        for counts in (self._recent_trials, self._recent_accepted):
            counts[first:] = [short * count for count in counts[first:]]

    def _start_again(self, requests: float, accepted_at: tuple[int, ...]) -> None:
        """Start from the last step alone: the short memory too is mostly of the time before the change."""
        unknown = [0.0] * (self.max_draft_length - len(accepted_at))
        self._trials = [requests, *map(float, accepted_at[:-1]), *unknown]
        self._accepted = [*map(float, accepted_at), *unknown]
        self._recent_trials, self._recent_accepted = self._trials.copy(), self._accepted.copy()
        self.num_changes += 1

    def add(self, acceptance: tuple[float, ...], num_trials: float) -> None:
        """Add the pseudo-counts of a prior."""
        survivors = num_trials
        for j, share in enumerate(acceptance[: self.max_draft_length]):
            self._trials[j] += survivors
            self._accepted[j] += survivors * share
            survivors *= share
        self._is_fresh = False

    def _has_changed(self, verified: int) -> bool:
        difference = variance = 0.0
        for j in range(verified):
            trials = self._recent_trials[j]
            h = (self._accepted[j] + PRIOR_TRIALS * PRIOR_ACCEPTANCE) / (self._trials[j] + PRIOR_TRIALS)
            difference += self._recent_accepted[j] - trials * h
            # Variance of a sum with weights m^i, from the sum of the weights; the long memory is not certain either.
            variance += trials * h * (1 - h) * (1 / (1 + SHORT_MEMORY) + trials / (self._trials[j] + PRIOR_TRIALS))
        return difference * difference > SURPRISE**2 * (variance + 0.3)

    def refresh(self) -> None:
        """Recompute the estimates from the counts. A position not known yet is taken to be like the one before it."""
        if self._is_fresh:
            return
        self._is_fresh = True
        h, survival, coverage, length, tokens = PRIOR_ACCEPTANCE, 1.0, 1.0, 1.0, 1.0
        conditional, log_variance, covered, lengths, num_tokens = [], [], [], [length], [tokens]
        for j in range(self.max_draft_length):
            prior = NEIGHBOUR_TRIALS if j else PRIOR_TRIALS
            trials = self._trials[j] + prior
            h = min(max((self._accepted[j] + prior * h) / trials, 1e-4), 1 - 1e-4)
            coverage = (self._proposed[j] + coverage) / (self._asked[j] + 1.0)
            survival *= h
            length += survival
            tokens += coverage
            conditional.append(h)
            log_variance.append((1 - h) / (h * trials))
            covered.append(coverage)
            lengths.append(length)
            num_tokens.append(tokens)
        self.conditional = conditional
        self.coverage = covered
        self.log_variance: Array = np.array(log_variance)  # variance of log h_j
        self.accepted_length: Array = np.array(lengths)
        self.log_length: Array = np.log(self.accepted_length)
        self.tokens_per_request: Array = np.array(num_tokens)
        # d log accepted_length_k / d log h_j = sum_{j<=i<=k} S_i / accepted_length_k
        gained_KJ = self.accepted_length[:, None] - self.accepted_length[:-1]
        self.gradient_KJ: Array = np.maximum(gained_KJ, 0.0) / self.accepted_length[:, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """Expected rates of every draft length at one batch, and their uncertainty."""

    log_rate_K: Array
    _log_length_K: Array
    _share_KF: Array
    _covariance: Array
    _gradient_KJ: Array
    _log_variance_J: Array

    def deviation_from(self, k: int) -> Array:
        """Standard deviation of log_rate_K - log_rate_K[k]; what all draft lengths share cancels."""
        return np.sqrt(self._time_variance(k) + self._length_variance(k))

    def hope(self, k: int, optimism: float) -> Array:
        """Return optimistic log rates: each with `optimism` standard deviations of its difference from k added.

        A longer draft never takes less time than k, so it cannot gain more than if it cost nothing: with a useless
        drafter there is nothing to hope for, however uncertain the times are."""
        length_variance_K = self._length_variance(k)
        hope_K = self.log_rate_K + optimism * np.sqrt(self._time_variance(k) + length_variance_K)
        free_K = self.log_rate_K[k] + self._log_length_K - self._log_length_K[k] + optimism * np.sqrt(length_variance_K)
        np.minimum(hope_K[k:], free_K[k:], out=hope_K[k:])
        return hope_K

    def _time_variance(self, k: int) -> Array:
        share_KF = self._share_KF - self._share_KF[k]
        return np.maximum(((share_KF @ self._covariance) * share_KF).sum(axis=1), 0.0)

    def _length_variance(self, k: int) -> Array:
        gradient_KJ = self._gradient_KJ - self._gradient_KJ[k]
        return (gradient_KJ * gradient_KJ) @ self._log_variance_J


class CostModel:
    """Step time and acceptance, combined to rates."""

    def __init__(self, max_draft_length: int, prior: Costs | None = None) -> None:
        self.step_time = StepTime()
        self.acceptance = Acceptance(max_draft_length)
        self.num_refused = 0
        if prior is not None:
            self._learn(prior)

    def observe(self, step: Step) -> None:
        if step.num_requests <= 0 or not 0 < step.seconds < float("inf"):  # also false for NaN
            self.num_refused += 1
            return
        self.acceptance.observe(step)
        if step.num_prefill_tokens == 0:
            tokens = step.num_requests + sum(step.proposed_at)
            x = self.step_time.features(step.num_requests, tokens, step.verified, step.drafted, step.context_tokens)
            self.step_time.observe(x, step.seconds)

    def outlook(self, num_requests: int, context_tokens: int) -> Outlook:
        acceptance = self.acceptance
        acceptance.refresh()
        seconds_K, share_KF = self.step_time.curve(
            num_requests, num_requests * acceptance.tokens_per_request, context_tokens
        )
        return Outlook(
            log_rate_K=acceptance.log_length + np.log(num_requests / seconds_K),
            _log_length_K=acceptance.log_length,
            _share_KF=share_KF,
            _covariance=self.step_time.covariance,
            _gradient_KJ=acceptance.gradient_KJ,
            _log_variance_J=acceptance.log_variance,
        )

    def expected_rate(self, num_requests: int, k: int, context_tokens: int) -> float:
        """Return the tokens per second that the engine settles at with draft length k."""
        acceptance = self.acceptance
        acceptance.refresh()
        tokens = num_requests * acceptance.tokens_per_request[k]
        return (
            num_requests
            * acceptance.accepted_length[k]
            / self.step_time.seconds(num_requests, tokens, k, k, context_tokens)
        )

    def _learn(self, prior: Costs) -> None:
        """Observe every point as up to four steps, in two rounds so that their order hardly matters; then add
        uncertainty, because the machine may be faster or slower at another time."""
        for _ in range(2):
            for point in prior.points:
                tokens = point.num_requests * (1 + point.verified)
                x = self.step_time.features(
                    point.num_requests, tokens, point.verified, point.drafted, point.context_tokens
                )
                for _ in range(min(point.num_steps, 2)):
                    self.step_time.observe(x, point.seconds)
        self.step_time.forget(together=0.5, alone=0.1)
        self.acceptance.add(prior.acceptance, min(prior.num_trials, 32))
