"""Online model of the throughput of each draft length: step time and acceptance.

The selector needs the tokens per second of the engine with draft length k on a batch of B requests, in steady state:

    rate(B, k) = B * (1 + sum_{j<=k} S_j) / T(B, verified=k, drafted=k)          S_j = h_1 * ... * h_j

**Step time T** comes from `step_time.py`.

**Yield S.** h_j is the probability that position j is accepted if all before it were. A position without a proposal
counts as rejected, so the sum also holds for a drafter that proposes less than requested. Counts are pooled over batch
sizes and decay slowly. A short memory beside the long one detects a changed drafter or policy; then both restart.
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
"""Standard deviations between the two memories above which the long one is discarded."""
PRIOR_ACCEPTANCE = 0.5
PRIOR_TRIALS = 2.0
NEIGHBOR_TRIALS = 8.0
"""Weight of the previous position in the estimate of a position, in requests. Few requests reach the end of a draft,
and four rejections there must not rule it out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One engine step, as observed by the scheduler."""

    num_requests: int
    num_prefill_tokens: int
    """Prompt tokens in the step; 0 is pure decoding. Steps with prefill update acceptance, not cost."""
    context_tokens: int
    """Sum of the requests' context lengths."""
    verified: int
    """Verified draft length, chosen one step earlier; 0 is none."""
    drafted: int
    """Draft length requested in this step, verified in the next."""
    seconds: float
    proposed_at: tuple[int, ...]
    """[j] = requests with a draft token at position j; model-free drafters may propose fewer than requested."""
    accepted_at: tuple[int, ...]
    """[j] = requests with position j accepted."""
    num_emitted: int

    @property
    def num_verifications(self) -> int:
        """Requests with a draft to verify."""
        return self.proposed_at[0] if self.proposed_at else 0

    @property
    def num_accepted(self) -> int:
        return sum(self.accepted_at)


class Acceptance:
    """Acceptance counts by draft position, in a long and a short memory."""

    def __init__(self, max_draft_length: int) -> None:
        self.max_draft_length = max_draft_length
        self.num_changes = 0
        # Requests with all earlier positions accepted, when this position was requested.
        self._trials = [0.0] * max_draft_length
        self._accepted = [0.0] * max_draft_length
        self._recent_trials = [0.0] * max_draft_length
        self._recent_accepted = [0.0] * max_draft_length
        self._asked = [0.0] * max_draft_length  # requests of steps that requested the position
        self._proposed = [0.0] * max_draft_length
        self._gap = 0  # steps since the last with drafts; memories decay in them too
        self._is_fresh = False
        self.refresh()

    @property
    def reach(self) -> int:
        """Number of positions with enough trials."""
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
        # Requests in prefill have no draft, and their number is unknown.
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
            self._restart(requests, accepted_at)
        self._is_fresh = False

    def _age(self, first: int, short: float) -> None:
        """Decay positions that were not requested too: nothing else would correct them."""
        for counts in (self._trials, self._accepted, self._asked, self._proposed):
            counts[first:] = [LONG_MEMORY * count for count in counts[first:]]
        for counts in (self._recent_trials, self._recent_accepted):
            counts[first:] = [short * count for count in counts[first:]]

    def _restart(self, requests: float, accepted_at: tuple[int, ...]) -> None:
        """Restart from the last step: the short memory, too, is mostly older than the change."""
        unknown = [0.0] * (self.max_draft_length - len(accepted_at))
        self._trials = [requests, *map(float, accepted_at[:-1]), *unknown]
        self._accepted = [*map(float, accepted_at), *unknown]
        self._recent_trials, self._recent_accepted = self._trials.copy(), self._accepted.copy()
        self.num_changes += 1

    def add(self, acceptance: tuple[float, ...], num_trials: float) -> None:
        """Add pseudo-counts of a prior."""
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
            # Variance of a sum with weights m^i, from the sum of the weights, plus the variance of the long memory.
            variance += trials * h * (1 - h) * (1 / (1 + SHORT_MEMORY) + trials / (self._trials[j] + PRIOR_TRIALS))
        return difference * difference > SURPRISE**2 * (variance + 0.3)

    def refresh(self) -> None:
        """Recompute the estimates from the counts. A position without data is estimated by the previous one."""
        if self._is_fresh:
            return
        self._is_fresh = True
        h, survival, coverage, length, tokens = PRIOR_ACCEPTANCE, 1.0, 1.0, 1.0, 1.0
        conditional: list[float] = []
        log_variance: list[float] = []
        covered: list[float] = []
        lengths, num_tokens = [length], [tokens]
        for j in range(self.max_draft_length):
            prior = NEIGHBOR_TRIALS if j else PRIOR_TRIALS
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
    """Expected rates of all draft lengths for one batch, with uncertainty."""

    log_rate_K: Array
    _log_length_K: Array
    _share_KF: Array
    _covariance: Array
    _gradient_KJ: Array
    _log_variance_J: Array

    def deviation_from(self, k: int) -> Array:
        """Return the standard deviation of log_rate_K - log_rate_K[k]; shared terms cancel."""
        return np.sqrt(self._time_variance(k) + self._length_variance(k))

    def hope(self, k: int, optimism: float) -> Array:
        """Return log rates plus `optimism` standard deviations of their difference from k. A longer draft never takes
        less time than k, so its gain is capped by a free draft: a useless drafter has no optimistic rate above k,
        however uncertain the times are."""
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
    """Combines step time and acceptance into rates."""

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

    def _learn(self, prior: Costs) -> None:
        """Observe each point as up to four steps, in two rounds to reduce the effect of their order; then add
        uncertainty, because the machine's speed may have changed."""
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
