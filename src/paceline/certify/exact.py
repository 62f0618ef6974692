"""The exact part of `paceline certify`: with coupled verification, speculation changes no token.

    with speculation       draft lengths 1 to the largest, then another at every step, then with preemptions
    without speculation    the same requests with the same seeds, token by token

Equal noise leaves equal tokens only where logits are equal, and rounding depends on the batch. So a first difference is
tried again without speculation: the other token's logit is raised by the noise that logits have, and if it is drawn
now, the two were tied. The comparison then goes on behind the other token. Any other difference is an error.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from paceline.certify.subject import Effort, Findings, Subject, running
from paceline.config import EngineConfig, FixedSelector
from paceline.context import Context
from paceline.orchestrator.generate import generate_all, generate_until
from paceline.rollout.engine import VllmEngine
from paceline.types import Engine, Floats, GroupId, Rollout, RolloutRequest

TEMPERATURES = (0.0, 0.6, 1.0, 1.3)
NOISE_LIMITS = {"float32": 1e-3, "bfloat16": 1.0}
"""Largest difference of logits by rounding, by dtype; a larger one is an error."""
_MOST_CERTAIN = 0.9
"""Probability of a token above which its log-probability says little about its logit."""
TIE_WIDTH = 2.0
"""Width of a tie in noise floors: both logits may move by one."""
_IN_FLIGHT = (8, 32)
"""Fewest and most requests at once."""
_FEWEST_DRAFTED = 1000
_MOST_SHOWN = 8
_GAPS = np.geomspace(1e-4, 64.0, 24)
"""Candidates for the gap of an error."""
_CRAMPED = 2
"""Requests of full length that fit into the KV cache that forces preemptions."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parting:
    """A token that differs: the first of a rollout, or the first behind a tie."""

    rollout: Rollout
    """With speculation."""
    request: RolloutRequest
    """Draws the token by itself."""
    position: int
    token: int
    plain_token: int
    """-1 where a rollout has ended."""
    logp: float
    plain_logp: float
    """Each engine reports its own token."""


@dataclass(slots=True, kw_only=True)
class Comparison:
    tokens: int = 0
    noise_floor: float = 0.0
    """Largest difference of logits of equal tokens, after temperature."""
    ties: list[Parting] = field(default_factory=list)
    errors: list[Parting] = field(default_factory=list)


def exact_part(found: Findings, subject: Subject, effort: Effort, context: Context) -> None:
    asyncio.run(_exact_part(found, subject, effort, context))


async def _exact_part(found: Findings, subject: Subject, effort: Effort, context: Context) -> None:
    config = subject.config.rollout.engine
    longest = subject.speculation.max_draft_length
    request_of = _requests(subject, effort)
    speculation = subject.speculation.model_copy(update={"selector": FixedSelector(draft_length=longest)})
    passes = [f"draft length {length}" for length in range(1, longest + 1)]
    passes += ["draft lengths at random", "preemptions and draft lengths at random"]
    numbers = itertools.count()
    pass_of: dict[int, str] = {}
    drafted: list[Rollout] = []

    tokens = -(-effort.exact_tokens // len(passes))
    fewest, most = _IN_FLIGHT
    in_flight = min(max(fewest, tokens // effort.exact_length), most, config.max_num_seqs)

    async def draft(engine: VllmEngine, name: str) -> None:
        context.progress(f"exact: {name}")
        requests = map(request_of, numbers)
        rollouts = await generate_until(engine, requests, min_tokens=tokens, max_in_flight=in_flight)
        pass_of.update((rollout.group_id.number, name) for rollout in rollouts)
        drafted.extend(rollouts)

    async with running(subject, config, speculation, seed=subject.seed) as engine:
        for length, name in enumerate(passes[:longest], start=1):
            await engine.set_draft_limit(length)
            await draft(engine, name)
        async with _changing_lengths(engine, longest, subject.seed):
            await draft(engine, passes[-2])
    cramped, cram = _cramped(subject, effort)
    async with (
        running(subject, cramped, speculation, seed=subject.seed, adjust=cram) as engine,
        _changing_lengths(engine, longest, subject.seed),
    ):
        await draft(engine, passes[-1])
        preemptions = (await engine.metrics())["engine/preemptions"]
    if subject.fault is not None and subject.fault.shifts_logp:
        drafted = [replace(rollout, logp=np.roll(rollout.logp, 1)) for rollout in drafted]
    async with running(subject, config, None, seed=subject.seed) as engine:
        context.progress(f"exact: {len(drafted)} rollouts without speculation")
        comparison = await compare(engine, drafted, request_of)
        gaps = [await _gap(engine, parting) for parting in comparison.errors[:_MOST_SHOWN]]
    _report(found, comparison, drafted, limit=NOISE_LIMITS[config.dtype], goal=effort.exact_tokens)
    found.add("preemptions", preemptions)
    if not preemptions and config.max_num_seqs > 1 and not config.deterministic:
        found.missing.append("no request was preempted")
    found.details["differences"] = [
        _told(parting, pass_of[parting.rollout.group_id.number]) | {"gap": gap}
        for parting, gap in zip(comparison.errors, gaps, strict=False)
    ]
    found.details["ties"] = [_told(parting, pass_of[parting.rollout.group_id.number]) for parting in comparison.ties]


def _report(found: Findings, comparison: Comparison, drafted: Sequence[Rollout], *, limit: float, goal: int) -> None:
    found.add("tokens", comparison.tokens, (">=", goal))
    found.add("differences", len(comparison.errors), ("<=", 0.0))
    found.add("ties", len(comparison.ties))
    if comparison.ties:
        found.add("tokens_to_first_tie", comparison.tokens / len(comparison.ties))
    found.add("noise_floor", comparison.noise_floor, ("<=", limit))
    num_drafted = sum(rollout.num_drafted for rollout in drafted)
    accepted = sum(rollout.num_accepted for rollout in drafted)
    verifications = sum(rollout.num_verifications for rollout in drafted)
    found.add("drafted_tokens", num_drafted)
    found.add("accepted_length", (accepted + verifications) / verifications if verifications else 0.0)
    if num_drafted < _FEWEST_DRAFTED:
        found.missing.append(f"{num_drafted} tokens were drafted; fewer than {_FEWEST_DRAFTED} say nothing")
    if accepted in (0, num_drafted):
        found.missing.append(f"{accepted} of {num_drafted} drafts were accepted; must be some, and not all")


def _requests(subject: Subject, effort: Effort) -> Callable[[int], RolloutRequest]:
    prompts = subject.prompts[: effort.num_prompts]
    temperatures = sorted({*TEMPERATURES, subject.config.rollout.temperature})
    max_tokens = min(effort.exact_length, subject.config.rollout.max_tokens)

    def request_of(number: int) -> RolloutRequest:
        prompt = prompts[number // len(temperatures) % len(prompts)]
        heat = temperatures[number % len(temperatures)]
        request = RolloutRequest.of(prompt, number, max_tokens=max_tokens, temperature=heat)
        return replace(request, seed=(subject.seed << 32) + number)

    return request_of


@asynccontextmanager
async def _changing_lengths(engine: VllmEngine, longest: int, seed: int) -> AsyncIterator[None]:
    """Set a random draft length between any two steps: an engine answers calls between steps."""

    over = asyncio.Event()

    async def change() -> None:
        generator = np.random.default_rng(seed)
        while not over.is_set():
            await engine.set_draft_limit(int(generator.integers(longest + 1)))

    task = asyncio.create_task(change())
    try:
        yield
    finally:
        over.set()  # no call is left unanswered
        await task


def _cramped(subject: Subject, effort: Effort) -> tuple[EngineConfig, Callable[..., None]]:
    """Return the engine's config with a KV cache for few requests, and the adjustment of its arguments."""
    config = subject.config.rollout.engine
    prompt = max(len(prompt.token_ids) for prompt in subject.prompts[: effort.num_prompts])
    length = min(config.max_model_len, prompt + effort.exact_length + 1)

    def cram(args: object) -> None:  # vLLM's AsyncEngineArgs
        block_size = vars(args)["block_size"] or 16
        vars(args)["num_gpu_blocks_override"] = 1 + _CRAMPED * -(-length // block_size)

    return config.model_copy(update={"max_model_len": length}), cram


async def compare(plain: Engine, drafted: Sequence[Rollout], request_of: Callable[[int], RolloutRequest]) -> Comparison:
    """Compare rollouts with those of an engine without speculation."""
    comparison = Comparison()
    still_open = {rollout.id: (rollout, 0) for rollout in drafted}
    while still_open:
        requests = {
            rollout_id: _continued(request_of(rollout.group_id.number), rollout, 0, start)
            for rollout_id, (rollout, start) in still_open.items()
        }
        theirs = {rollout.id: rollout for rollout in await generate_all(plain, list(requests.values()))}
        found = [
            _first_parting(comparison, rollout, start, requests[rollout_id], theirs[rollout_id])
            for rollout_id, (rollout, start) in still_open.items()
        ]
        partings = [parting for parting in found if parting is not None]
        ties = await _tied(plain, partings, TIE_WIDTH * comparison.noise_floor)
        still_open = {}
        for parting, tied in zip(partings, ties, strict=True):
            if not tied:
                comparison.errors.append(parting)
                continue
            comparison.ties.append(parting)
            if parting.position + 1 < len(parting.rollout.token_ids):
                still_open[parting.rollout.id] = parting.rollout, parting.position + 1
    return comparison


def _continued(request: RolloutRequest, rollout: Rollout, start: int, num: int) -> RolloutRequest:
    """Append `num` tokens of a rollout from `start` on to the prompt. Noise depends on positions, and stays."""
    prompt_ids = np.concatenate([request.prompt_ids, rollout.token_ids[start : start + num]])
    return replace(request, prompt_ids=prompt_ids, max_tokens=request.max_tokens - num)


def _first_parting(
    comparison: Comparison, rollout: Rollout, start: int, request: RolloutRequest, plain: Rollout
) -> Parting | None:
    """Count the equal tokens of a rollout from `start` on and return its first that differs, if any."""
    mine_T, theirs_T = rollout.token_ids[start:], plain.token_ids
    common = min(len(mine_T), len(theirs_T))
    equal = int(np.cumprod(mine_T[:common] == theirs_T[:common]).sum())
    comparison.noise_floor = max(comparison.noise_floor, _noise(rollout.logp[start:][:equal], plain.logp[:equal]))
    comparison.tokens += equal
    if equal == len(mine_T) == len(theirs_T):
        return None
    comparison.tokens += 1
    token, logp = _at(rollout, start + equal)
    plain_token, plain_logp = _at(plain, equal)
    return Parting(
        rollout=rollout,
        request=replace(_continued(request, rollout, start, equal), max_tokens=1),
        position=start + equal,
        token=token,
        plain_token=plain_token,
        logp=logp,
        plain_logp=plain_logp,
    )


def _noise(mine_T: Floats, theirs_T: Floats) -> float:
    """Return the largest difference between logits of tokens, given their log-probabilities.

    A logit that moves by d moves the log-probability of its token by (1 - p) d, and ties are between tokens with small
    p. So tokens that are nearly certain are left out."""
    unsure_T = ~(theirs_T > math.log(_MOST_CERTAIN))  # NaN included
    moved_T = np.abs(mine_T - theirs_T)[unsure_T] / -np.expm1(theirs_T[unsure_T])
    return float(np.nan_to_num(moved_T, nan=np.inf).max(initial=0.0))


def _at(rollout: Rollout, position: int) -> tuple[int, float]:
    if position == len(rollout.token_ids):
        return -1, 0.0
    return int(rollout.token_ids[position]), float(rollout.logp[position])


async def _tied(plain: Engine, partings: Sequence[Parting], width: float) -> list[bool]:
    """Return whether each token of a drafted rollout is drawn without speculation, if its logit is larger by `width`
    after temperature."""
    drawn = await _drawn(plain, [(parting, width) for parting in partings if parting.token >= 0])
    outcomes = iter(drawn)
    return [parting.token >= 0 and next(outcomes) for parting in partings]


async def _gap(plain: Engine, parting: Parting) -> float | None:
    """Return by how much the logit of the token is too small, after temperature and noise; None if it is not found."""
    if parting.token < 0:
        return None
    drawn = await _drawn(plain, [(parting, float(gap)) for gap in _GAPS])
    return next((float(gap) for gap, mine in zip(_GAPS, drawn, strict=True) if mine), None)


async def _drawn(plain: Engine, trials: Sequence[tuple[Parting, float]]) -> list[bool]:
    requests = [
        replace(
            parting.request,
            group_id=GroupId(number),
            logit_bias={parting.token: gap * (parting.request.temperature or 1.0)},
        )
        for number, (parting, gap) in enumerate(trials)
    ]
    rollouts = await generate_all(plain, requests) if requests else []
    return [rollout.token_ids[0] == parting.token for rollout, (parting, _) in zip(rollouts, trials, strict=True)]


def _told(parting: Parting, name: str) -> dict[str, Any]:
    """Return what reproduces a difference: prompt and equal tokens, with seed and temperature."""
    return {
        "request": str(parting.rollout.id),
        "pass": name,
        "position": parting.position,
        "token": parting.token,
        "plain_token": parting.plain_token,
        "logp": parting.logp,
        "plain_logp": parting.plain_logp,
        "seed": parting.request.seed,
        "temperature": parting.request.temperature,
        "prefix": parting.request.prompt_ids.tolist(),
    }
