"""The batch that both engines of the demo generate, and what is seen of it while it runs."""

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
"""Share of a written solution's length that is asked for: hardly any request then runs on after its end."""

_FIRST_WORDS = 4
"""Tokens of a prompt that the certificate's samples go on from: reading whole prompts would take most of its time."""


@dataclass(slots=True, kw_only=True)
class DemoTimeline:
    """One engine on the batch, seconds counted from its start."""

    name: str
    num_requests: int
    at_s: list[float] = field(default_factory=list)
    """End of each step so far."""
    running: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    """Tokens that were there after each step."""
    draft_length: list[int] = field(default_factory=list)

    def add(self, seconds: float, num_running: int, num_tokens: int, draft_length: int) -> None:
        """Take in the end of a step."""
        self.at_s.append(seconds)
        self.running.append(num_running)
        self.num_tokens.append(num_tokens)
        self.draft_length.append(draft_length)

    @property
    def seconds(self) -> float:
        return self.at_s[-1] if self.at_s else 0.0

    def rates(self, window_s: float = 2.0) -> npt.NDArray[np.float64]:
        """Tokens a second over the last moments, at the end of every step."""
        at_s, tokens = np.array([0.0, *self.at_s]), np.array([0, *self.num_tokens])
        first = np.searchsorted(at_s, at_s[1:] - window_s)
        return (tokens[1:] - tokens[first]) / np.maximum(at_s[1:] - at_s[first], 1e-9)


def long_tailed_batch(model_path: Path, *, num_requests: int, longest: int, seed: int) -> list[RolloutRequest]:
    """Arena prompts with the lengths of written solutions, the same work for both engines."""
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
    """Generate the batch; `watch` is called after every step, when `timeline` has grown by it."""
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
    """What the engine says after the first words of each prompt, `num_samples` times: ids_NT by prompt, -1 after the
    end."""
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
