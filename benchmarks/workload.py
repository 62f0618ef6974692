"""The batch of the speculation benches: arena prompts with long-tailed lengths, the same work for every arm.

Sampled lengths differ from run to run, and the longest decides a makespan, so lengths are drawn once. The policy
answers the prompts three times; the draw with the middle longest answer gives the lengths of the batch. Each group gets
a prompt with longer answers (75 % of its shortest answer is closest to the group's longest length), so that few arms
generate past the end of a response, where the policy was not trained; long prompts are added for the longest lengths.
`past_end_share` is the share of tokens after an end. Requests of the batch have seeds and verification is coupled, so
that all arms generate the same tokens up to rounding.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from paceline.arena.task import problems
from paceline.config import EngineConfig, LearnedDrafter, SpeculationConfig, load_config
from paceline.context import Context
from paceline.devices import fast_precision
from paceline.drafters.checkpoint import write_checkpoint
from paceline.rollout.arguments import end_tokens
from paceline.rollout.stepped import Order, SteppedEngine, stepped_engine
from paceline.selector.cost import Step
from paceline.sessions.workloads import resolve_drafter
from paceline.types import GroupId, RolloutRequest

MODEL = "arena:large"
SOURCE = "arena:small"
"""The policy that arena:large was grown from: the same answers at the least cost."""
ENGINE = EngineConfig(max_model_len=768, max_num_seqs=64, kv_cache_gb=4.0, compile=True)
_CHOICE = 2000
"""Prompts from which the longest are taken."""
_OF_SHORTEST = 0.75
_SETTINGS = (
    "speculation.drafter.kind=",
    "speculation.drafter.path=",
    "speculation.max_draft_length=",
    "speculation.verification=",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ridge:
    """Speed of plain vLLM on this machine."""

    prefill_tokens_per_s: float
    one_token_s: float
    """Seconds of a step of one token."""

    @property
    def tokens(self) -> float:
        """Tokens of a step at which computing takes as long as reading the weights."""
        return self.prefill_tokens_per_s * self.one_token_s


@dataclass(frozen=True, slots=True)
class RequestSet:
    requests: list[RolloutRequest]
    end_ids: frozenset[int]

    @property
    def lengths(self) -> list[int]:
        return [request.max_tokens for request in self.requests]


def asked_for(overrides: Sequence[str], *, bench: str = "rollout") -> SpeculationConfig:
    """Return the overrides' speculation; the arena's DFlash drafter and the default draft length without any."""
    for override in overrides:
        if not override.startswith(_SETTINGS):
            raise ValueError(f"bench {bench}: got {override!r}; must begin with {' or '.join(_SETTINGS)}")
    kinds = [override.removeprefix(_SETTINGS[0]) for override in overrides if override.startswith(_SETTINGS[0])]
    kind = (kinds or ["dflash"])[-1]
    own = [f"policy.model={MODEL}", f"{_SETTINGS[0]}{kind}", f"{_SETTINGS[1]}{MODEL}/{kind}", f"{_SETTINGS[3]}coupled"]
    asked = load_config(None, [*own, *overrides])
    assert asked.speculation is not None
    return asked.speculation


def drafter_path(asked: SpeculationConfig, context: Context) -> Path:
    assert isinstance(asked.drafter, LearnedDrafter)
    return resolve_drafter(asked.drafter.path, context)


def past_end_share(responses: Sequence[Sequence[int]], end_ids: Collection[int]) -> float:
    """Return the share of tokens after the first end-of-sequence token of their response."""
    past = 0
    for tokens in responses:
        end = next((place for place, token in enumerate(tokens) if token in end_ids), len(tokens) - 1)
        past += len(tokens) - 1 - end
    return past / sum(map(len, responses))


def fastest(config: EngineConfig) -> EngineConfig:
    """Return the engine's settings in the fastest precision of the machine."""
    return config.model_copy(update={"dtype": fast_precision()})


def one_of(config: EngineConfig, num: int) -> EngineConfig:
    """Return the settings of one of `num` processes that share a GPU."""
    return config.model_copy(update={"gpu_memory_utilization": config.gpu_memory_utilization / num})


def rate(steps: Sequence[Step]) -> float:
    """Return tokens per second."""
    return sum(step.num_emitted for step in steps) / sum(step.seconds for step in steps)


@contextmanager
def engines(
    model_path: Path,
    speculations: Sequence[SpeculationConfig | None],
    *,
    seed: int,
    context: Context,
    config: EngineConfig = ENGINE,
) -> Iterator[list[SteppedEngine]]:
    """Start one engine for each, all on all cores, one after another: compiling uses every core, and engines of one
    kind reuse the first one's compiled code."""
    share = one_of(config, len(speculations))
    with ExitStack() as stack:
        started = []
        for number, speculation in enumerate(speculations):
            context.progress(f"starting engine {number + 1} of {len(speculations)}")
            started.append(
                stack.enter_context(stepped_engine(model_path, speculation, seed=seed + number, config=share))
            )
        yield started


def arena_requests(
    model_path: Path, *, num_prompts: int, group_size: int, max_tokens: int, seed: int
) -> list[RolloutRequest]:
    """Make groups of arena prompts."""
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
    """Make requests of the longest of many prompts, the longest last, without the first `num_requests`."""
    requests = arena_requests(
        model_path, num_prompts=_CHOICE + num_requests, group_size=1, max_tokens=max_tokens, seed=seed
    )
    return sorted(requests[num_requests:], key=lambda request: len(request.prompt_ids))[-num_requests:]


def grouped(
    engine: SteppedEngine, model_path: Path, *, num_prompts: int, group_size: int, max_tokens: int, draws: int = 3
) -> RequestSet:
    """Make groups of siblings with the policy's own lengths; nothing is cut off the tail."""
    usual = arena_requests(model_path, num_prompts=num_prompts, group_size=group_size, max_tokens=max_tokens, seed=0)
    longer = [
        replace(request, group_id=GroupId(num_prompts + number), index=index)
        for number, request in enumerate(
            long_requests(model_path, num_requests=num_prompts, max_tokens=max_tokens, seed=0)
        )
        for index in range(group_size // 2)
    ]
    order = Order(requests=[*usual, *longer], name="lengths")
    lengths = np.array([[len(tokens) for tokens in engine.run(order).token_ids] for _ in range(draws)])
    drawn = sorted(lengths[:, : len(usual)].tolist(), key=max)[draws // 2]
    return RequestSet(give_group_lengths(order.requests, lengths, drawn, group_size), frozenset(end_tokens(model_path)))


def give_group_lengths(
    candidates: Sequence[RolloutRequest], lengths: np.ndarray, wanted: Sequence[int], group_size: int
) -> list[RolloutRequest]:
    """Give each group of wanted lengths a prompt, the longest group first. `lengths`: [draw, candidate]."""
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
        replace(
            chosen[number],
            group_id=GroupId(number),
            index=index,
            max_tokens=length,
            seed=number * group_size + index,
        )
        for number, group in enumerate(groups)
        for index, length in enumerate(group)
    ]


def random_drafter(like: Path, out: Path, *, seed: int) -> None:
    """Write a drafter of the usual cost that guesses nothing: a copy of `like` with random matrices."""
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(like / "model.safetensors")
    for name, weight in weights.items():
        if weight.is_floating_point() and weight.ndim == 2:
            weights[name] = (torch.randn(weight.shape, generator=generator) / math.sqrt(weight.shape[1])).to(
                weight.dtype
            )
    config = json.loads((like / "config.json").read_text(encoding="utf-8"))
    write_checkpoint(out, config, weights, like / "tokenizer.json")
