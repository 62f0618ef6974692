"""The batch that the speculation benches share: arena prompts with long-tailed lengths, the same work for every arm.

Sampled lengths differ from run to run, and the longest of 64 decides a makespan, so lengths are fixed once. The policy answers
twice as many prompts as are needed, three times each. The batch gets the quantiles of these lengths; each is given to the prompt
whose shortest answer comes nearest to it, and that is how many tokens its requests run for from then on. So the batch has the
policy's own distribution of lengths, and few responses end before their length; those that do go on past their end, and how many
tokens are such is reported (`past_end_share`). Requests have no seed of their own: vLLM then draws for all at once, which is faster
in every arm.
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
from paceline.rollout.stepped import Batch, Order, SteppedEngine
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
    """One engine for each, all on all cores; they take turns. Started one after another: compiling wants every core, and engines
    of one kind find what the first has compiled."""
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
    engine: SteppedEngine,
    model_path: Path,
    candidates: Sequence[RolloutRequest],
    *,
    num_requests: int,
    selector: SelectorConfig,
    draws: int = 3,
) -> Workload:
    """The batch described above, from prompts of which each has some chance to be in it."""
    order = Order(requests=candidates, selector=selector, name="lengths")
    lengths = np.array([[len(tokens) for tokens in engine.run(order).token_ids] for _ in range(draws)])
    return Workload(match_lengths(candidates, lengths, num_requests), frozenset(end_tokens(model_path)))


def match_lengths(candidates: Sequence[RolloutRequest], lengths: np.ndarray, num_requests: int) -> list[RolloutRequest]:
    """`lengths`: [draw, candidate]. The longest are matched first, because few candidates come near them."""
    unused = dict(enumerate(lengths.min(axis=0).tolist()))
    requests = []
    for wanted in reversed(np.quantile(lengths, (np.arange(num_requests) + 0.5) / num_requests).tolist()):
        number = min(unused, key=lambda number: abs(unused[number] - wanted))
        requests.append(replace(candidates[number], max_tokens=unused.pop(number)))
    return requests
