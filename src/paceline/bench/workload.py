"""The batch that the speculation benches share: arena prompts with long-tailed lengths, the same work for every arm.

Sampled lengths differ from run to run, and the longest of 64 decides a makespan, so lengths are drawn once: the policy answers
every prompt three times, and from then on each request runs for exactly as many tokens as the shortest of these. A response that
ends earlier still goes on past its end; how many tokens are such is reported (`past_end_share`). Requests have no seed of their
own: vLLM then draws for all at once, which is faster in every arm.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from paceline.arena.task import problems
from paceline.config import EngineConfig, SelectorConfig, SpeculationConfig
from paceline.rollout.engine import end_tokens
from paceline.rollout.stepped import Batch, SteppedEngine
from paceline.strategy.cost import Step
from paceline.types import RolloutRequest

ENGINE = EngineConfig(max_model_len=768, max_num_seqs=64, kv_cache_gb=4.0, compile=True, start_deadline_s=900)


@dataclass(frozen=True, slots=True)
class Workload:
    requests: list[RolloutRequest]
    end_ids: frozenset[int]

    @property
    def lengths(self) -> list[int]:
        return [request.max_tokens for request in self.requests]

    def past_end_share(self, batch: Batch) -> float:
        """Share of tokens after the first end-of-sequence token of their response."""
        past = 0
        for tokens in batch.token_ids:
            end = next((place for place, token in enumerate(tokens) if token in self.end_ids), len(tokens) - 1)
            past += len(tokens) - 1 - end
        return past / sum(map(len, batch.token_ids))


@contextmanager
def engines(
    model_path: Path,
    speculations: Sequence[SpeculationConfig | None],
    *,
    seed: int,
    progress: Callable[[str], None],
    config: EngineConfig = ENGINE,
) -> Iterator[list[SteppedEngine]]:
    """One engine for each, all on all cores; they take turns. Started one after another: compiling wants every core."""
    cpus = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        started = []
        for number, speculation in enumerate(speculations):
            progress(f"starting engine {number + 1} of {len(speculations)}")
            engine = SteppedEngine(model_path, config, seed=seed + number, cpus=cpus, speculation=speculation)
            stack.callback(engine.close)
            engine.wait()
            started.append(engine)
        yield started


def rate(steps: Sequence[Step]) -> float:
    """Tokens per second."""
    return sum(step.num_emitted for step in steps) / sum(step.seconds for step in steps)


def arena_requests(model_path: Path, *, num_prompts: int, group_size: int, max_tokens: int, seed: int) -> list[RolloutRequest]:
    """Groups of arena prompts, in order. No seeds: vLLM draws for all at once."""
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    return [
        RolloutRequest(
            group_id=group,
            index=index,
            prompt_ids=np.asarray(tokenizer.encode(problem.prompt), np.int32),
            max_tokens=max_tokens,
            temperature=1.0,
        )
        for group, problem in enumerate(islice(problems(seed), num_prompts))
        for index in range(group_size)
    ]


def long_tailed(
    engine: SteppedEngine, model_path: Path, requests: Sequence[RolloutRequest], *, selector: SelectorConfig, draws: int = 3
) -> Workload:
    """Let the policy answer, and take the length of the shortest of some answers: few of the later ones end before it."""
    answers = [engine.run(requests, selector=selector, name="lengths") for _ in range(draws)]
    shortest = [min(map(len, of_one)) for of_one in zip(*(batch.token_ids for batch in answers), strict=True)]
    fixed = [replace(request, max_tokens=length) for request, length in zip(requests, shortest, strict=True)]
    return Workload(fixed, frozenset(end_tokens(model_path)))
