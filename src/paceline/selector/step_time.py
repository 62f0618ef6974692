"""Online model of the time of an engine step.

T = sum_i w_i * x_i with w > 0, where x holds a constant (reading weights), the requests, the tokens to verify (in
segments with a slope each: flat while the step is bound by memory, steep once it is bound by compute), the first and
further drafter passes (each with a part per request), and the context. So data at 60 requests applies at 50, and a
longer draft is never cheaper. The state is theta = log w and the observation is log T, because noise on a shared
machine is multiplicative. An extended Kalman filter tracks it:

    g = d log T / d theta = w * x / T  (the share of each cost in the step; sums to 1)
    theta += P g / (g'Pg + R) * (log seconds - log T),      P -= P g g'P / (g'Pg + R),      P += Q in every step

Q models drift of the machine's speed: all thetas move together, fast (`DRIFT_TOGETHER`), and each alone, slowly
(`DRIFT_ALONE`). A slower machine thus changes no ratios between draft lengths, and a choice depends on ratios only.
Outliers count little: R grows with the square of the error, as under Student's t. Two outliers in a row are a shift
(`_notice_shift`).
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

TOKEN_KNOTS = (0.0, 8.0, 32.0, 128.0, 512.0)
"""Numbers of tokens to verify at which the marginal cost may change."""

# Costs: prior median relative to the constant, and deviation of the logarithm.
_PRIOR = (
    ("constant", 1.0, 0.5),
    ("request", 0.01, 1.2),
    *((f"token_from_{knot:.0f}", 0.012, 1.2) for knot in TOKEN_KNOTS),
    ("verification", 0.03, 1.0),
    ("first_pass", 0.03, 1.2),
    ("first_pass_request", 0.001, 1.2),
    ("further_pass", 0.05, 1.0),
    ("further_pass_request", 0.002, 1.2),
    ("context", 2e-6, 1.5),
    ("context_verified", 5e-7, 1.5),
)
COSTS = tuple(name for name, _, _ in _PRIOR)
_TOKENS = slice(2, 2 + len(TOKEN_KNOTS))
_CONTEXT = slice(len(COSTS) - 2, len(COSTS))
_SEGMENTS = tuple(zip(TOKEN_KNOTS, (*(b - a for a, b in pairwise(TOKEN_KNOTS)), math.inf), strict=True))

DRIFT_TOGETHER = 0.03
DRIFT_ALONE = 0.004
"""Standard deviations of the random walk per step: all log costs together, and each alone."""
SEGMENT_CORRELATION = 0.8
"""Prior correlation between the slopes of neighboring token segments: data on one informs the next."""
STUDENT = 4.0
"""Degrees of freedom of the noise: a step with an error of z deviations counts 1 / (1 + z^2 / STUDENT)."""
FAR_OFF, SHIFT, SHIFT_ALONE = 3.0, 2.0, 0.1
"""Clip of a step's error in deviations; the moving average of errors that indicates a new machine speed; the
uncertainty added to each cost alone in that case."""
LARGEST_MOVE = 0.7
"""Largest change of a log cost per step; the filter is linear only locally."""


class StepTime:
    """Log w of every cost, and their covariance."""

    def __init__(self) -> None:
        deviation = np.array([deviation for _, _, deviation in _PRIOR])
        correlation = np.eye(len(COSTS))
        segment = np.arange(len(TOKEN_KNOTS))
        correlation[_TOKENS, _TOKENS] = SEGMENT_CORRELATION ** abs(segment[:, None] - segment[None, :])
        self.log_cost: Array = np.log([median for _, median, _ in _PRIOR])
        self.covariance: Array = correlation * np.outer(deviation, deviation)
        self.noise = 0.15**2
        self.num_observed = 0
        self._off = 0.0  # moving average of errors in deviations
        self._lowest = self.log_cost - 4 * deviation
        self._widest = deviation**2
        self._drift = DRIFT_TOGETHER**2 + DRIFT_ALONE**2 * np.eye(len(COSTS))
        self._cost: Array = np.exp(self.log_cost)
        self._knots = np.array(TOKEN_KNOTS)
        self._widths = np.array([width for _, width in _SEGMENTS])
        self._fixed: dict[tuple[int, int], Array] = {}

    def features(self, num_requests: int, num_tokens: float, verified: int, drafted: int, context: float) -> Array:
        """Return x of one step, in the order of COSTS; `num_tokens` to verify include one per request."""
        further = max(drafted - 1, 0)
        first = 1.0 if drafted else 0.0
        segments = [min(max(num_tokens - knot, 0.0), width) for knot, width in _SEGMENTS]
        verification = 1.0 if verified else 0.0
        passes = (first, first * num_requests, further, further * num_requests)
        return np.array(
            (1.0, num_requests, *segments, verification, *passes, context, context * verified), dtype=np.float64
        )

    def curve(self, num_requests: int, num_tokens_K: Array, context: float) -> tuple[Array, Array]:
        """Return seconds at verified = drafted = 0..k, and the share of each cost (the gradient of log seconds)."""
        key = (num_requests, len(num_tokens_K))
        if key not in self._fixed:
            self._fixed[key] = np.stack([self.features(num_requests, 0, k, k, 1.0) for k in range(len(num_tokens_K))])
        x_KF = self._fixed[key].copy()
        x_KF[:, _TOKENS] = np.minimum(np.maximum(num_tokens_K[:, None] - self._knots, 0.0), self._widths)
        x_KF[:, _CONTEXT] *= context
        seconds_K = x_KF @ self._cost
        x_KF *= self._cost
        x_KF /= seconds_K[:, None]
        return seconds_K, x_KF

    def observe(self, features: Array, seconds: float) -> None:
        predicted = float(features @ self._cost)
        share = features * self._cost
        share /= predicted
        error = math.log(seconds / predicted)
        if self.num_observed == 0:  # the prior has only ratios
            self.log_cost += error
            self._lowest += error
            self.covariance += 0.5
            error = 0.0
        self.num_observed += 1
        self.covariance += self._drift
        self._notice_shift(error, share)
        gain = self.covariance @ share
        known = float(share @ gain)
        surprise = error * error / (known + self.noise)
        variance = known + self.noise * max(1.0, (STUDENT + surprise) / (STUDENT + 1))
        move = gain * (error / variance)
        if known * error * error > (0.5 * LARGEST_MOVE * variance) ** 2:  # rare
            move = np.clip(move, -LARGEST_MOVE, LARGEST_MOVE)
        self.log_cost += move
        np.maximum(self.log_cost, self._lowest, out=self.log_cost)
        np.exp(self.log_cost, out=self._cost)
        self.covariance -= gain[:, None] * (gain / variance)
        self.noise += 0.02 * (min(max(error * error - known, 0.0), 9 * self.noise) - self.noise)
        self.noise = max(self.noise, 0.03**2)
        if self.num_observed % 256 == 0:
            self._bound()

    def _notice_shift(self, error: float, share: Array) -> None:
        """Forget the machine's speed after two consecutive large errors of the same sign: it has changed, or the very
        first step, which set the scale, was an outlier. Treated as outliers, such steps would distort the ratios
        between lengths."""
        deviation = math.sqrt(float(share @ self.covariance @ share) + self.noise)
        self._off = (self._off + min(max(error / deviation, -FAR_OFF), FAR_OFF)) / 2
        if abs(self._off) > SHIFT:
            self.forget(together=abs(error), alone=SHIFT_ALONE)
            self._off = 0.0

    def forget(self, *, together: float, alone: float) -> None:
        """Add uncertainty. Ratios of older measurements are more reliable than their seconds."""
        self.covariance += together**2 + alone**2 * np.eye(len(COSTS))

    def _bound(self) -> None:
        """Bound the uncertainty of unobserved costs: deviations at most the prior's, correlations unchanged."""
        shrink = np.minimum(1.0, np.sqrt((self._widest + 0.5) / np.diagonal(self.covariance)))
        self.covariance *= shrink[:, None] * shrink
        self.covariance = (self.covariance + self.covariance.T) / 2
