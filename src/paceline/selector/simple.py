"""A simple selector: moving averages by bucket of batch sizes, the argmax of the rate, and 2 % probes.

    rate(B, k) = B * (1 + sum_{j<=k} h_1 * ... * h_j) / seconds(B, k)

Buckets are powers of two. Each holds moving averages of `seconds` by draft length and of acceptance by position.
Seconds of unused lengths are interpolated linearly. A new bucket copies the nearest one, with seconds scaled by its
first step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from paceline.selector.cost import Step

PROBE_EVERY, PROBE_STEPS = 100, 2
"""Two steps per hundred: the first drafts at the other length, the second verifies it and drafts again."""
TOGETHER, ALONE = 0.3, 0.05
"""Weights of a new step in the machine's speed, and in the log seconds of its draft length. A slower machine slows all
lengths: charging only the one in use would make the selector switch."""
MEMORY = 1 - 1 / 100
"""Share of the acceptance counts that remains after a step."""
PRIOR_TRIALS = 8.0
"""Weight of the previous position in an estimate, in requests."""


class Simple:
    def __init__(self, max_draft_length: int) -> None:
        self._max = max_draft_length
        self._log_seconds: dict[int, np.ndarray] = {}  # by bucket; [k], NaN if unused
        self._scaled: set[int] = set()  # buckets with a step of their own
        self._trials: dict[int, np.ndarray] = {}
        self._accepted: dict[int, np.ndarray] = {}
        self._step = self._num_probes = self._chosen = self._requests = 0
        self._slowness = 0.0  # current, of the machine, as a logarithm
        self._rates = np.ones(max_draft_length + 1)  # per request

    def choose(self, num_requests: int, context_tokens: int) -> int:
        bucket = self._bucket(num_requests)
        self._step += 1
        unknown = [k for k in (0, self._max) if math.isnan(self._log_seconds[bucket][k])]
        self._rates = self._expected(bucket) if not unknown else np.ones(self._max + 1)
        if unknown:
            self._chosen = unknown[0]
        elif (turn := self._step % PROBE_EVERY) == 0:
            best, up = int(self._rates.argmax()), self._step // PROBE_EVERY % 2
            self._chosen = best + 1 if best == 0 or (up and best < self._max) else best - 1
            self._num_probes += 1
        elif turn >= PROBE_STEPS:
            self._chosen = int(self._rates.argmax())
        self._requests = num_requests
        return self._chosen

    def observe(self, step: Step) -> None:
        if step.num_requests <= 0 or not 0 < step.seconds < math.inf:
            return
        bucket, verified = self._bucket(step.num_requests), step.verified
        accepted = step.accepted_at[: min(verified, self._max)]
        if accepted:
            survivors = (step.proposed_at[0], *accepted[:-1])
            for counts, new in ((self._trials, survivors), (self._accepted, accepted)):
                counts[bucket] = MEMORY * counts[bucket]
                counts[bucket][: len(new)] += new
        if step.num_prefill_tokens or verified != step.drafted or verified > self._max:
            return
        known, seen = self._log_seconds[bucket], math.log(step.seconds) - self._slowness
        if math.isnan(known[verified]):
            known[verified] = seen
        off = seen - known[verified]
        if bucket in self._scaled:
            off = min(max(off, -0.7), 0.7)  # an interrupted step
            self._slowness += TOGETHER * off
            known[verified] += ALONE * off
        else:
            known += off
            self._scaled.add(bucket)

    def _bucket(self, num_requests: int) -> int:
        bucket = max(num_requests - 1, 0).bit_length()
        if bucket not in self._log_seconds:
            unknown = (np.full(self._max + 1, np.nan), np.zeros(self._max), np.zeros(self._max))
            nearest = min(self._scaled, key=lambda known: abs(known - bucket), default=-1)
            self._log_seconds[bucket] = self._log_seconds.get(nearest, unknown[0]).copy()
            self._trials[bucket] = 0.1 * self._trials.get(nearest, unknown[1])
            self._accepted[bucket] = 0.1 * self._accepted.get(nearest, unknown[2])
        return bucket

    def _acceptance(self, bucket: int) -> np.ndarray:
        h, found = 0.5, np.empty(self._max)
        for j, (trials, accepted) in enumerate(zip(self._trials[bucket], self._accepted[bucket], strict=True)):
            h = found[j] = (accepted + PRIOR_TRIALS * h) / (trials + PRIOR_TRIALS)
        return found

    def _expected(self, bucket: int) -> np.ndarray:
        """Return tokens per second of one request by draft length."""
        lengths, known = np.arange(self._max + 1), ~np.isnan(self._log_seconds[bucket])
        seconds = np.interp(lengths, lengths[known], np.exp(self._log_seconds[bucket][known]))
        accepted_length = np.append(1.0, 1 + np.cumsum(np.cumprod(self._acceptance(bucket))))
        return accepted_length / (seconds * math.exp(self._slowness))

    def expected_rate(self) -> float | None:
        return float(self._requests * self._rates[self._chosen]) if self._step else None

    def figures(self) -> Mapping[str, float]:
        rates = {f"expected_rate/{k}": float(rate) for k, rate in enumerate(self._rates)}
        return {"chosen": float(self._chosen), "num_probes": float(self._num_probes)} | rates
