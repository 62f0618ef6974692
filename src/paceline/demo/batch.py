"""The batch of the demo's two engines, and its timeline."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
from transformers import AutoTokenizer

from paceline.arena.task import problems, solution
from paceline.config import SelectorConfig
from paceline.rollout.stepped import Order, SteppedBatch, SteppedEngine
from paceline.types import GroupId, RolloutRequest, Tokens

_OF_SOLUTION = 0.8
"""Length of a request as a share of a solution's length, so that few requests continue beyond their end."""

_FIRST_WORDS = 4
"""Prompt tokens of the certificate's samples; prefill of whole prompts would take most of the time."""


@dataclass(slots=True, kw_only=True)
class DemoTimeline:
    """Progress of one engine, in seconds since its start."""

    name: str
    num_requests: int
    at_s: list[float] = field(default_factory=list)
    """End of each step."""
    running: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    """Total tokens after each step."""
    draft_length: list[int] = field(default_factory=list)

    def add(self, seconds: float, num_running: int, num_tokens: int, draft_length: int) -> None:
        """Add a step."""
        self.at_s.append(seconds)
        self.running.append(num_running)
        self.num_tokens.append(num_tokens)
        self.draft_length.append(draft_length)

    @property
    def seconds(self) -> float:
        return self.at_s[-1] if self.at_s else 0.0

    def rates(self, window_s: float = 2.0) -> npt.NDArray[np.float64]:
        """Return the tokens per second over a moving window, at the end of every step."""
        at_s, tokens = np.array([0.0, *self.at_s]), np.array([0, *self.num_tokens])
        first = np.searchsorted(at_s, at_s[1:] - window_s)
        return (tokens[1:] - tokens[first]) / np.maximum(at_s[1:] - at_s[first], 1e-9)


def long_tailed_batch(model_path: Path, *, num_requests: int, longest: int, seed: int) -> list[RolloutRequest]:
    """Return arena prompts with fixed response lengths taken from solutions."""
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    rng = random.Random(seed)  # noqa: S311  a workload, not a secret
    requests = []
    for number, problem in enumerate(islice(problems(seed), num_requests)):
        length = len(tokenizer.encode(solution(problem, rng)))
        requests.append(
            RolloutRequest(
                group_id=GroupId(number),
                index=0,
                prompt_ids=np.asarray(tokenizer.encode(problem.prompt), np.int32),
                max_tokens=max(1, min(longest, int(_OF_SOLUTION * length))),
                temperature=1.0,
            )
        )
    return requests


def play(
    engine: SteppedEngine,
    requests: list[RolloutRequest],
    timeline: DemoTimeline,
    *,
    selector: SelectorConfig | None,
    watch: Callable[[], None],
) -> SteppedBatch:
    """Generate the batch, and call `watch` after adding each step to `timeline`."""
    engine.begin(Order(requests=requests, selector=selector, name="demo", to_the_end=True))
    while not isinstance(answer := engine.turn(), SteppedBatch):
        if answer.seconds:
            timeline.add(answer.seconds, answer.num_running, answer.num_tokens, answer.draft_length)
        watch()
    timeline.add(answer.seconds, 0, sum(map(len, answer.token_ids)), timeline.draft_length[-1])
    return answer


def said(
    engine: SteppedEngine,
    requests: list[RolloutRequest],
    *,
    selector: SelectorConfig | None,
    num_samples: int,
    tokens: int,
) -> list[Tokens]:
    """Return `num_samples` continuations of the first tokens of each prompt: ids_NT by prompt, padded with -1."""
    repeated = [
        replace(request, prompt_ids=request.prompt_ids[:_FIRST_WORDS], max_tokens=tokens)
        for request in requests
        for _ in range(num_samples)
    ]
    batch = engine.run(Order(requests=repeated, selector=selector, name="demo"))
    tables = [np.full((num_samples, tokens), -1, np.int32) for _ in requests]
    for number, ids in enumerate(batch.token_ids):
        tables[number // num_samples][number % num_samples, : len(ids)] = ids
    return tables
