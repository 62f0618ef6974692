"""Draft length selectors: the measured one, and alternatives for comparison.

The measured selector takes the argmax of the expected rate of `cost.py`, with three additions.

- **Ladder.** Without a prior, drafts grow 1, 3, 7: to twice the known positions plus one. One draft token per request
  exposes a useless drafter; longer drafts need no trial, because they never take less time.
- **Probes.** A draft length that is best under an optimistic estimate runs for two consecutive steps, so that one step
  both verifies and drafts it. Each probe costs credit, which grows by `EXPLORE` per step after an initial sum. After a
  failed probe, the length is not probed again for 8 steps at similar batch sizes, then 16, and so on. Draft length 0
  gives no acceptance data, so one token is drafted after 32 steps, then 64, then every 128: this finds a recovered
  drafter at a cost below 1 %.
- **Hysteresis.** A new best length must lead by `MARGIN`, which decays from the last change.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Protocol

import numpy as np

from paceline.config import (
    BanditSelector,
    FixedSelector,
    MeasuredSelector,
    SelectorConfig,
    SimpleSelector,
    TableSelector,
)
from paceline.selector.cost import CostModel, Outlook, Step
from paceline.selector.cost_file import load_costs
from paceline.selector.simple import Simple

EXPLORE = 0.02
"""Largest share of steps spent on draft lengths other than the best known one."""
MARGIN = 0.03
"""Relative gain that a new draft length must promise: hysteresis against flapping."""
OPTIMISM, MOST_OPTIMISM, OPTIMISM_STEPS = 1.0, 3.0, 64
"""Standard deviations added to a draft length's rate for probes: one more per 64 steps without a probe, because the
model can be both certain and wrong."""
PROBE_STEPS = 2
"""Steps of a probe: the first drafts with the new length, the second verifies and drafts again."""
OPENING_STEPS = 20.0
"""Initial credit for probes, in steps."""
RETRY_WAIT, FIRST_WAIT, LONGEST_WAIT = 8, 32, 128
"""Steps until a failed draft length, or an unused drafter, is tried again; doubles each time."""
MARGIN_HALF_LIFE = 8.0
"""Half-life of the margin in steps: prevents flapping, but a small lasting advantage wins eventually."""
SETTLED, EVALUATE_EVERY = 32, 4
"""After 32 steps without a change or probe, re-evaluate a batch of the same size in every fourth step only. The model's
arithmetic finds cold caches after each step and would cost about 1 % of it."""

THRESHOLDS, EPSILON, WINDOW = (4, 16), 0.1, 10
"""BEG-MAB's batch sizes at which buckets start, share of random choices, and rewards per median."""


class Selector(Protocol):
    def choose(self, num_requests: int, context_tokens: int) -> int: ...

    def observe(self, step: Step) -> None: ...

    def expected_rate(self) -> float | None:
        """Return expected tokens per second of the last choice, None if the selector predicts nothing."""
        ...

    def figures(self) -> Mapping[str, float]: ...


def build_selector(config: SelectorConfig, *, max_draft_length: int, max_num_requests: int, seed: int = 0) -> Selector:
    match config:
        case MeasuredSelector():
            prior = None if config.costs is None else load_costs(config.costs)
            model = CostModel(max_draft_length, prior)
            return Measured(model, max_draft_length=max_draft_length)
        case FixedSelector():
            if config.draft_length > max_draft_length:
                raise ValueError(
                    f"selector.draft_length: got {config.draft_length}; must be at most {max_draft_length} because the "
                    "engine was built for drafts of that length"
                )
            return Table([config.draft_length] * (max_num_requests + 1))
        case TableSelector():
            return Table(
                dense_table(config.ranges, max_draft_length=max_draft_length, max_num_requests=max_num_requests)
            )
        case BanditSelector():
            return Bandit(max_draft_length=max_draft_length, seed=seed)
        case SimpleSelector():
            return Simple(max_draft_length)


class Measured:
    """Chooses the argmax of the expected rate with hysteresis, and probes uncertain lengths."""

    def __init__(self, model: CostModel, *, max_draft_length: int) -> None:
        self.model = model
        self._max = max_draft_length
        self._current: int = 0
        self._age = 1e9  # steps since `_current` changed
        self._probe = 0
        self._probe_left = 0
        self._credit = OPENING_STEPS
        self._since_drafts = FIRST_WAIT  # steps since acceptance was last seen
        self._wait = FIRST_WAIT
        self._num_probes = 0
        self._num_switches = 0
        self._chosen = 0
        self._failed_probes = [(0, 0.0, 0)] * (max_draft_length + 1)  # blocked until step, wait, batch
        self._step = 0
        self._last_probe = 0
        self._num_requests = 0  # of the last evaluated batch
        self._num_changes = 0
        self._outlook: Outlook | None = None

    def observe(self, step: Step) -> None:
        self.model.observe(step)
        if step.verified:
            self._since_drafts = 0
        if self.model.acceptance.num_changes != self._num_changes:
            self._num_changes = self.model.acceptance.num_changes
            self._failed_probes = [(0, 0.0, 0)] * (self._max + 1)
            self._wait = FIRST_WAIT

    def choose(self, num_requests: int, context_tokens: int) -> int:
        if num_requests <= 0:
            return 0
        self._step += 1
        self._since_drafts += 1
        self._credit = min(self._credit + EXPLORE, OPENING_STEPS)
        self._age += 1
        if self._must_evaluate(num_requests):
            self._evaluate(num_requests, max(context_tokens, 0))
        if self._probe_left > 0:
            self._probe_left -= 1
            self._chosen = self._probe
        else:
            self._chosen = self._current
        return self._chosen

    def _must_evaluate(self, num_requests: int) -> bool:
        quiet = min(self._age, self._step - self._last_probe)
        return quiet < SETTLED or num_requests != self._num_requests or self._step % EVALUATE_EVERY == 0

    def _evaluate(self, num_requests: int, context_tokens: int) -> None:
        self._num_requests = num_requests
        outlook = self._outlook = self.model.outlook(num_requests, context_tokens)
        reach = min(2 * self.model.acceptance.reach + 1, self._max)
        self._settle(outlook, reach)
        if self._probe_left == 0:
            self._start_probe(outlook, reach, num_requests)

    def _settle(self, outlook: Outlook, reach: int) -> None:
        log_rate_K = outlook.log_rate_K[: reach + 1]
        best = int(log_rate_K.argmax())
        if best == self._current:
            return
        gain = log_rate_K[best] - outlook.log_rate_K[self._current]
        if gain > MARGIN * 0.5 ** (self._age / MARGIN_HALF_LIFE):
            self._current, self._age = best, 0
            self._num_switches += 1

    def _start_probe(self, outlook: Outlook, reach: int, num_requests: int) -> None:
        if self._credit < PROBE_STEPS:
            return
        if self._current == 0 and self._since_drafts > self._wait:
            self._wait = min(2 * self._wait, LONGEST_WAIT)
            self._since_drafts = 0
            self._begin(1, 1 if num_requests >= 8 else 3)  # a step of few requests gives little data
            return
        optimism = min(OPTIMISM + (self._step - self._last_probe) / OPTIMISM_STEPS, MOST_OPTIMISM)
        hope_K = outlook.hope(self._current, optimism)
        for k, (until, _, batch) in enumerate(self._failed_probes):
            if self._step < until and batch <= 2 * num_requests and num_requests <= 2 * batch:
                hope_K[k] = -np.inf
        hope_K[self._current] = -np.inf
        k = int(hope_K[: reach + 1].argmax())
        if hope_K[k] > outlook.log_rate_K[self._current] + MARGIN:
            _, wait, _ = self._failed_probes[k]
            wait = min(max(2 * wait, RETRY_WAIT), LONGEST_WAIT)
            self._failed_probes[k] = (self._step + int(wait), wait, num_requests)
            self._begin(k, PROBE_STEPS)

    def _begin(self, k: int, num_steps: int) -> None:
        self._probe, self._probe_left = k, num_steps
        self._credit -= num_steps
        self._last_probe = self._step
        self._num_probes += 1

    def expected_rate(self) -> float | None:
        return None if self._outlook is None else float(np.exp(self._outlook.log_rate_K[self._chosen]))

    def figures(self) -> Mapping[str, float]:
        acceptance = self.model.acceptance
        acceptance.refresh()
        figures = {
            "chosen": float(self._chosen),
            "current": float(self._current),
            "num_probes": float(self._num_probes),
            "num_switches": float(self._num_switches),
            "num_acceptance_changes": float(acceptance.num_changes),
            "num_refused_steps": float(self.model.num_refused),
            "step_noise": self.model.step_time.noise**0.5,
        }
        for j, h in enumerate(acceptance.conditional):
            figures[f"acceptance/{j + 1}"] = h
        if self._outlook is not None:
            for k, log_rate in enumerate(self._outlook.log_rate_K):
                figures[f"expected_rate/{k}"] = float(np.exp(log_rate))
        return figures


class Table:
    def __init__(self, draft_lengths: list[int]) -> None:
        self._draft_lengths = draft_lengths
        self._chosen = 0

    def choose(self, num_requests: int, context_tokens: int) -> int:
        self._chosen = self._draft_lengths[min(max(num_requests, 0), len(self._draft_lengths) - 1)]
        return self._chosen

    def observe(self, step: Step) -> None:
        pass

    def expected_rate(self) -> float | None:
        return None

    def figures(self) -> Mapping[str, float]:
        return {"chosen": float(self._chosen)}


def dense_table(ranges: tuple[tuple[int, int, int], ...], *, max_draft_length: int, max_num_requests: int) -> list[int]:
    """Expand ranges to [batch size] -> draft length, as vLLM does: gaps and the end repeat the previous length."""
    ordered = sorted(ranges)
    if not ordered or ordered[0][0] != 1:
        raise ValueError(
            f"selector.ranges: got {ranges}; must start at batch size 1 so that every batch has a draft length"
        )
    end = 0
    for first, last, k in ordered:
        if first <= end or last < first or k < 0:
            raise ValueError(
                f"selector.ranges: got {ranges}; must be (first, last, draft length) without overlap, first <= last, "
                "length >= 0"
            )
        end = last
    starts = [first for first, _, _ in ordered]
    table = [
        min(ordered[bisect_right(starts, batch) - 1][2], max_draft_length) for batch in range(1, max_num_requests + 1)
    ]
    return [0, *table]


class Bandit:
    """BEG-MAB (Hu et al., "Taming the Long-Tail", arXiv 2511.16665).

    Each bucket of batch sizes uses the arm with the best median reward of a sliding window, or a random arm with
    probability epsilon. Untried arms come first. The reward is the step's tokens per second; the arm is the verified
    draft length."""

    def __init__(self, *, max_draft_length: int, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311
        self._rewards = [
            [deque[float](maxlen=WINDOW) for _ in range(max_draft_length + 1)] for _ in range(len(THRESHOLDS) + 1)
        ]
        self._chosen = 0
        self._num_explored = 0

    def choose(self, num_requests: int, context_tokens: int) -> int:
        arms = self._rewards[bisect_right(THRESHOLDS, num_requests)]
        if self._random.random() < EPSILON:
            self._num_explored += 1
            self._chosen = self._random.randrange(len(arms))
        else:
            self._chosen = max(range(len(arms)), key=lambda k: median(arms[k]) if arms[k] else float("inf"))
        return self._chosen

    def observe(self, step: Step) -> None:
        if step.num_prefill_tokens or step.num_requests <= 0 or not 0 < step.seconds < float("inf"):
            return
        arms = self._rewards[bisect_right(THRESHOLDS, step.num_requests)]
        if step.verified < len(arms):
            arms[step.verified].append(step.num_emitted / step.seconds)

    def expected_rate(self) -> float | None:
        return None

    def figures(self) -> Mapping[str, float]:
        return {"chosen": float(self._chosen), "num_explored": float(self._num_explored)}
