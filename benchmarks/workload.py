"""The batch that the speculation benches share: arena prompts with long-tailed lengths, the same work for every arm.

Sampled lengths differ from run to run, and the longest of 64 decides a makespan, so lengths are fixed once. The policy
answers some prompts three times. Of the three sets of answers, the one whose longest answer is the middle one gives the
lengths of the batch. Each length goes to a prompt with longer answers: 75 % of that prompt's shortest answer comes
closest to the length. So hardly any arm has to continue after the end of a response, where the policy says nothing that
it was trained to say. Long prompts are added to make room for the longest lengths. The share of tokens that come after
an end all the same is reported (`past_end_share`). Requests have no seed of their own: vLLM then draws for all at once,
which is faster in every arm.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from paceline.arena.policy import GROWN
from paceline.arena.task import problems
from paceline.config import EngineConfig, SelectorConfig, SpeculationConfig, load_config
from paceline.context import Context
from paceline.devices import fast_precision
from paceline.rollout.arguments import end_tokens
from paceline.rollout.stepped import Order, SteppedBatch, SteppedEngine, stepped_engine
from paceline.selector.cost import Step
from paceline.sessions.workloads import resolve_policy
from paceline.types import GroupId, RolloutRequest

ENGINE = EngineConfig(max_model_len=768, max_num_seqs=64, kv_cache_gb=4.0, compile=True)


_CHOICE = 2000
"""Prompts from which the longest are taken where long responses are wanted."""
_OF_SHORTEST = 0.75
_SETTINGS = ("speculation.drafter.kind=", "speculation.drafter.path=", "speculation.max_draft_length=")


@dataclass(frozen=True, slots=True)
class RequestSet:
    requests: list[RolloutRequest]
    end_ids: frozenset[int]

    @property
    def lengths(self) -> list[int]:
        return [request.max_tokens for request in self.requests]

    def past_end_share(self, batch: SteppedBatch) -> float:
        return past_end_share(batch.token_ids, self.end_ids)


def asked_for(overrides: Sequence[str], model: str = "arena:large", *, bench: str = "rollout") -> SpeculationConfig:
    """Return the overrides on top of the arena's DFlash drafter, the fastest one without training."""
    for override in overrides:
        if not override.startswith(_SETTINGS):
            raise ValueError(f"bench {bench}: got {override!r}; must begin with {' or '.join(_SETTINGS)}")
    kinds = [override.removeprefix(_SETTINGS[0]) for override in overrides if override.startswith(_SETTINGS[0])]
    kind = (kinds or ["dflash"])[-1]
    own = [f"policy.model={model}", f"{_SETTINGS[0]}{kind}", f"{_SETTINGS[1]}{model}/{kind}"]
    asked = load_config(None, [*own, *overrides])
    assert asked.speculation is not None
    return asked.speculation


def past_end_share(responses: Sequence[Sequence[int]], end_ids: Collection[int]) -> float:
    """Share of tokens after the first end-of-sequence token of their response."""
    past = 0
    for tokens in responses:
        end = next((place for place, token in enumerate(tokens) if token in end_ids), len(tokens) - 1)
        past += len(tokens) - 1 - end
    return past / sum(map(len, responses))


def fastest(config: EngineConfig) -> EngineConfig:
    """The same engine in the precision that is fastest here: a rival in another would be slowed down."""
    return config.model_copy(update={"dtype": fast_precision()})


def one_of(config: EngineConfig, num: int) -> EngineConfig:
    """Settings of one of `num` users of the same GPU that are alive at once: they share what one alone would take."""
    return config.model_copy(update={"gpu_memory_utilization": config.gpu_memory_utilization / num})


@contextmanager
def engines(
    model_path: Path,
    speculations: Sequence[SpeculationConfig | None],
    *,
    seed: int,
    context: Context,
    config: EngineConfig = ENGINE,
) -> Iterator[list[SteppedEngine]]:
    """Start one engine for each, all on all cores; they take turns.

    They start one after another: compiling uses every core, and engines of one kind reuse what the first compiled.
    """
    share = one_of(config, len(speculations))
    with ExitStack() as stack:
        started = []
        for number, speculation in enumerate(speculations):
            context.progress(f"starting engine {number + 1} of {len(speculations)}")
            started.append(
                stack.enter_context(stepped_engine(model_path, speculation, seed=seed + number, config=share))
            )
        yield started


def rate(steps: Sequence[Step]) -> float:
    """Tokens per second."""
    return sum(step.num_emitted for step in steps) / sum(step.seconds for step in steps)


def arena_requests(
    model_path: Path, *, num_prompts: int, group_size: int, max_tokens: int, seed: int
) -> list[RolloutRequest]:
    """Make groups of arena prompts, in order. They have no seeds: vLLM draws for all at once."""
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    return [
        RolloutRequest(
            group_id=GroupId(group),
            index=index,
            prompt_ids=np.asarray(tokenizer.encode(problem.prompt), np.int32),
            max_tokens=max_tokens,
            temperature=1.0,
        )
        for group, problem in enumerate(islice(problems(seed), num_prompts))
        for index in range(group_size)
    ]


def long_requests(model_path: Path, *, num_requests: int, max_tokens: int, seed: int) -> list[RolloutRequest]:
    """The longest of many prompts, whose answers are long too; the longest last, none of the first `num_requests`."""
    requests = arena_requests(
        model_path, num_prompts=_CHOICE + num_requests, group_size=1, max_tokens=max_tokens, seed=seed
    )
    return sorted(requests[num_requests:], key=lambda request: len(request.prompt_ids))[-num_requests:]


def long_tailed(
    engine: SteppedEngine,
    model_path: Path,
    *,
    num_requests: int,
    selector: SelectorConfig,
    max_tokens: int,
    seed: int,
    draws: int = 3,
) -> RequestSet:
    """Make the batch described above."""
    usual = arena_requests(model_path, num_prompts=num_requests, group_size=1, max_tokens=max_tokens, seed=seed)
    candidates = usual + long_requests(model_path, num_requests=num_requests, max_tokens=max_tokens, seed=seed)
    order = Order(requests=candidates, selector=selector, name="lengths")
    lengths = np.array([[len(tokens) for tokens in engine.run(order).token_ids] for _ in range(draws)])
    usual_lengths = sorted(lengths[:, :num_requests].tolist(), key=max)
    return RequestSet(give_lengths(candidates, lengths, usual_lengths[draws // 2]), frozenset(end_tokens(model_path)))


def give_lengths(
    candidates: Sequence[RolloutRequest], lengths: np.ndarray, wanted: Sequence[float]
) -> list[RolloutRequest]:
    """Choose a candidate for each wanted length, the longest first, because few come near it. `lengths`: [draw,
    candidate]."""
    unused = dict(enumerate((_OF_SHORTEST * lengths.min(axis=0)).astype(int).tolist()))
    requests = []
    for length in sorted(wanted, reverse=True):
        number = min(unused, key=lambda number: abs(unused[number] - length))
        requests.append(replace(candidates[number], max_tokens=max(unused.pop(number), 1)))
    return requests


def grouped(
    engine: SteppedEngine,
    model_path: Path,
    *,
    num_prompts: int,
    group_size: int,
    max_tokens: int,
    seed: int,
    draws: int = 3,
) -> RequestSet:
    """Groups of siblings, one after another, with the lengths that the policy gave them in one of three draws: the one
    whose longest is the middle one. Nothing is cut off the tail."""
    usual = arena_requests(model_path, num_prompts=num_prompts, group_size=group_size, max_tokens=max_tokens, seed=seed)
    longer = [
        replace(request, group_id=GroupId(num_prompts + number), index=index)
        for number, request in enumerate(
            long_requests(model_path, num_requests=num_prompts, max_tokens=max_tokens, seed=seed)
        )
        for index in range(group_size // 2)
    ]
    order = Order(requests=[*usual, *longer], name="lengths")
    lengths = np.array([[len(tokens) for tokens in engine.run(order).token_ids] for _ in range(draws)])
    drawn = sorted(lengths[:, : len(usual)].tolist(), key=max)[draws // 2]
    return RequestSet(give_group_lengths(order.requests, lengths, drawn, group_size), frozenset(end_tokens(model_path)))


def drawn_from(model: str, context: Context) -> Path:
    """Return a checkpoint that answers as the policy does, with the same lengths, at the least cost: that which it was
    grown from."""
    grown = GROWN.get(model.removeprefix("arena:")) if model.startswith("arena:") else None
    return resolve_policy(model if grown is None else f"arena:{grown.source}", context)


def give_group_lengths(
    candidates: Sequence[RolloutRequest], lengths: np.ndarray, wanted: Sequence[int], group_size: int
) -> list[RolloutRequest]:
    """Give each group of wanted lengths a prompt, the longest group first: the one of which 75 % of the shortest answer
    comes nearest to the group's longest length. Lengths stay as wanted. `lengths`: [draw, candidate]."""
    prompts = {request.group_id: request for request in candidates}
    shortest = {
        group: _OF_SHORTEST
        * min(lengths[:, number].min() for number, one in enumerate(candidates) if one.group_id == group)
        for group in prompts
    }
    groups = [list(wanted[first : first + group_size]) for first in range(0, len(wanted), group_size)]
    chosen: dict[int, RolloutRequest] = {}
    for number in sorted(range(len(groups)), key=lambda number: -max(groups[number])):
        group = min(shortest, key=lambda group: abs(shortest[group] - max(groups[number])))
        del shortest[group]
        chosen[number] = prompts[group]
    return [
        replace(chosen[number], group_id=GroupId(number), index=index, max_tokens=length)
        for number, group in enumerate(groups)
        for index, length in enumerate(group)
    ]
