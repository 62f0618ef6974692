"""A fake engine that steps a long-tailed batch as vLLM does: the draft chosen in one step is verified in the next.

The selector is shown noisy seconds (lognormal, some steps three times too slow, the machine's speed drifting); arms
are compared by the true seconds, so that a comparison is about choices and not about luck.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.selector.cost import Step
from paceline.selector.select import Selector

Seconds = Callable[[int, int, int, int, int], float]  # requests, tokens to verify, verified, drafted, context


def cpu(num_requests: int, num_tokens: int, verified: int, drafted: int, context: int) -> float:
    """A 350 M policy on two cores: 50 ms at batch 1, 270 ms at batch 64; EAGLE makes one pass also at draft length
    0."""
    return 1e-3 * (
        46 + 2.2 * num_requests + 1.1 * num_tokens + max(drafted, 1) * (3 + 0.15 * num_requests) + 4e-4 * context
    )


def gpu(num_requests: int, num_tokens: int, verified: int, drafted: int, context: int) -> float:
    """Bound by memory up to 32 tokens, by compute beyond."""
    return 1e-3 * (max(6.0, 6.0 * num_tokens / 32) + 0.5 * max(drafted, 1) + 2e-6 * context * (1 + verified))


def ridge(num_requests: int, num_tokens: int, verified: int, drafted: int, context: int) -> float:
    """A machine like that of the bench `rollout`: computing takes as long as reading the weights at 44 tokens, which is
    inside of one segment of the cost model and between draft lengths 1 and 3 of 16 requests."""
    reading, computing = 35.0, 0.8 * num_tokens
    verifying = (reading**3 + computing**3) ** (1 / 3)
    return 1e-3 * (verifying + 1.5 + 0.15 * num_requests + max(drafted, 1) * (2.8 + 0.06 * num_requests))


def tiled(num_requests: int, num_tokens: int, verified: int, drafted: int, context: int) -> float:
    """Tokens are padded to tiles of 32, and the drafter makes one pass for any length: not the form that the cost
    model has."""
    return 1e-3 * (20 + 12 * -(-num_tokens // 32) + (4 + 0.05 * num_requests if drafted else 0.0))


def concave(num_requests: int, num_tokens: int, verified: int, drafted: int, context: int) -> float:
    """Large batches use the cores better; the drafter is expensive."""
    return 1e-3 * (15 + 9 * num_tokens**0.7 + 9 * drafted * (1 + num_requests / 40))


GOOD = (0.81, 0.815, 0.77, 0.80, 0.88, 0.86, 0.75)  # accepted length 1.81, 2.47, 2.98, 3.39, 3.75, 4.06, 4.29
NGRAM = (0.20, 0.45, 0.45, 0.45, 0.45, 0.45, 0.45)
USELESS = (0.01,) * 7


@dataclass(slots=True)
class Run:
    """Expected tokens stand for sampled ones in all three times: which draft was lucky is no part of the comparison."""

    seconds: float = 0.0
    best_seconds: float = 0.0
    """That the same progress takes at the draft length that is best at each batch size."""
    plain_seconds: float = 0.0
    """The same with draft length 0."""
    chosen: list[tuple[int, int]] = field(default_factory=list)
    """Requests and draft length of every step."""

    @property
    def of_hindsight(self) -> float:
        return self.best_seconds / self.seconds

    @property
    def of_plain(self) -> float:
        return self.plain_seconds / self.seconds


def long_tail(seed: int, num_requests: int = 64, longest: int = 500) -> np.ndarray:
    lengths = np.random.default_rng(seed).lognormal(4.2, 0.8, num_requests)
    return np.clip(lengths, 8, longest).astype(int)


class SteppingEngine:
    def __init__(
        self,
        seconds: Seconds,
        acceptance: Sequence[float],
        *,
        seed: int,
        noise: float = 0.12,
        outliers: float = 0.02,
        drift: float = 0.25,
    ) -> None:
        self.true_seconds = seconds
        self.acceptance = np.asarray(acceptance)
        self.lengths = [1.0, *(1 + np.cumsum(np.cumprod(self.acceptance))).tolist()]
        self.noise, self.outliers, self.drift = noise, outliers, drift
        self.random = np.random.default_rng(seed)
        self.num_steps = 0
        self.phase = self.random.uniform(0, 2 * np.pi)

    def seen(self, true: float) -> float:
        slow = 3.0 if self.random.random() < self.outliers else 1.0
        speed = 1 + self.drift * np.sin(self.phase + self.num_steps / 60)
        return true * slow * speed * float(np.exp(self.noise * self.random.standard_normal()))

    def step(self, num_requests: int, verified: int, drafted: int, context: int) -> tuple[Step, np.ndarray, float]:
        accepted_RJ = np.cumprod(self.random.random((num_requests, verified)) < self.acceptance[:verified], axis=1)
        accepted_at = tuple(int(n) for n in accepted_RJ.sum(axis=0))
        emitted_R = 1 + accepted_RJ.sum(axis=1)
        true = self.true_seconds(num_requests, num_requests * (1 + verified), verified, drafted, context)
        self.num_steps += 1
        step = Step(
            num_requests=num_requests,
            num_prefill_tokens=0,
            context_tokens=context,
            verified=verified,
            drafted=drafted,
            seconds=self.seen(true),
            proposed_at=(num_requests,) * verified,
            accepted_at=accepted_at,
            num_emitted=int(emitted_R.sum()),
        )
        return step, emitted_R, true

    def play(self, selector: Selector, lengths: np.ndarray, prompt: int = 100) -> Run:
        """Step until every request has its length; a request leaves when it is done."""
        run = Run()
        left = lengths.copy()
        done = np.zeros_like(left)
        verified = 0
        while len(left):
            context = int(done.sum()) + prompt * len(left)
            drafted = selector.choose(len(left), context)
            run.chosen.append((len(left), drafted))
            step, emitted, true = self.step(len(left), verified, drafted, context)
            selector.observe(step)
            run.seconds += true
            tokens = len(left) * self.accepted_length(verified)
            rates = [self.rate(len(left), k, context) for k in range(len(self.acceptance) + 1)]
            run.best_seconds += tokens / max(rates)
            run.plain_seconds += tokens / rates[0]
            left, done = left - emitted, done + emitted
            done, left = done[left > 0], left[left > 0]
            verified = drafted
        return run

    def hold(self, selector: Selector, num_requests: int, num_steps: int, context_each: int = 200) -> np.ndarray:
        """A batch that does not shrink; returns (draft length, true rate at that length) of every step."""
        chosen, verified = [], 0
        for _ in range(num_steps):
            drafted = selector.choose(num_requests, num_requests * context_each)
            step, _, _ = self.step(num_requests, verified, drafted, num_requests * context_each)
            selector.observe(step)
            chosen.append((drafted, self.rate(num_requests, drafted, num_requests * context_each)))
            verified = drafted
        return np.array(chosen)

    def rate(self, num_requests: int, k: int, context: int) -> float:
        return (
            num_requests
            * self.accepted_length(k)
            / self.true_seconds(num_requests, num_requests * (1 + k), k, k, context)
        )

    def accepted_length(self, k: int) -> float:
        return self.lengths[k]

    def best_table(self, max_num_requests: int, max_draft_length: int, context_each: int = 200) -> list[int]:
        """Hindsight: the draft length with the best true rate at every batch size."""
        return [0] + [
            int(np.argmax([self.rate(b, k, b * context_each) for k in range(max_draft_length + 1)]))
            for b in range(1, max_num_requests + 1)
        ]
