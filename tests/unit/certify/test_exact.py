"""The exact comparison on a stand-in for an engine whose draws are known."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from paceline.certify.exact import Comparison, _noise, compare
from paceline.types import GroupId, Rollout, RolloutRequest, Tokens

VOCABULARY, LENGTH, ROUNDING = 12, 20, 1e-5
PROMPT = np.array([3, 1], np.int32)


def noisy_logits(seed: int, prefix: Sequence[int]) -> np.ndarray:
    """What a token is drawn from: depends on seed and position through noise, on the prefix through the policy."""
    noise_V = np.random.default_rng([seed, len(prefix)]).gumbel(size=VOCABULARY)
    return noise_V + np.random.default_rng(list(prefix)).normal(size=VOCABULARY)


def close(seed: int, prefix: Sequence[int]) -> bool:
    """Whether rounding may decide here: some positions are made a tie."""
    return (seed + len(prefix)) % 7 == 0


class PlainEngine:
    """Draws the largest noisy logit; at ties the second is below by a part of the rounding."""

    name = "plain"

    def __init__(self) -> None:
        self._finished: list[Rollout] = []

    async def submit(self, requests: Sequence[RolloutRequest]) -> None:
        self._finished = [rollout_of(request) for request in requests]

    async def collect(self) -> Sequence[Rollout]:
        return self._finished


def draw(request: RolloutRequest, prefix: Sequence[int]) -> int:
    assert request.seed is not None
    logit_V = noisy_logits(request.seed, prefix)
    if close(request.seed, prefix):
        second, first = np.argsort(logit_V)[-2:]
        logit_V[second] = logit_V[first] - ROUNDING / 2
    for token, bias in (request.logit_bias or {}).items():
        logit_V[token] += bias / request.temperature
    return int(logit_V.argmax())


def rollout_of(request: RolloutRequest, *, other_at: Sequence[int] = ()) -> Rollout:
    """The tokens of a request, with the second best at some positions."""
    ids = request.prompt_ids.tolist()
    for position in range(request.max_tokens):
        token = draw(request, ids)
        if position in other_at:
            assert request.seed is not None
            token = int(np.argsort(noisy_logits(request.seed, ids))[-2])
        ids.append(token)
    token_ids = np.array(ids[len(request.prompt_ids) :], np.int32)
    return Rollout(
        group_id=request.group_id,
        index=request.index,
        prompt_ids=request.prompt_ids,
        token_ids=token_ids,
        logp=np.full(len(token_ids), -1.0, np.float32),
        finish_reason="length",
        version_spans=((0, len(token_ids)),),
        engine="",
        started_s=0.0,
        finished_s=0.0,
    )


def request_of(number: int) -> RolloutRequest:
    return RolloutRequest(
        group_id=GroupId(number), index=0, prompt_ids=PROMPT, max_tokens=LENGTH, temperature=0.7, seed=number
    )


def compared(rollouts: Sequence[Rollout]) -> Comparison:
    return asyncio.run(compare(PlainEngine(), rollouts, request_of))  # pyright: ignore[reportArgumentType]  a part


def rounded(rollout: Rollout) -> Rollout:
    """As another batch rounds log-probabilities."""
    logp = rollout.logp.copy()
    logp[0] += ROUNDING
    return replace(rollout, logp=logp)


def test_equal_rollouts_have_no_difference() -> None:
    found = compared([rounded(rollout_of(request_of(number))) for number in range(8)])
    assert (found.tokens, found.ties, found.errors) == (8 * LENGTH, [], [])
    # All tokens have a log-probability of -1.
    assert found.noise_floor == pytest.approx(ROUNDING / (1 - np.exp(-1)), rel=0.1)


def test_certain_tokens_say_nothing_about_the_noise_of_logits() -> None:
    """Divided by a rounding error of 1 - p, their difference would make any error a tie."""
    rollout = rollout_of(request_of(1))
    theirs = np.array([-1e-7, -1e-2, -1.0], np.float32)
    assert _noise(theirs + np.float32(1e-3), theirs) == pytest.approx(1e-3 / (1 - np.exp(-1)), rel=0.01)
    assert compared([rollout]).noise_floor == 0


def test_ties_are_told_from_errors_and_the_comparison_goes_on() -> None:
    """Fuzz: some positions draw the second best token, and which of them rounding may decide is known."""
    generator = np.random.default_rng(0)
    for trial in range(int(os.environ.get("PACELINE_FUZZ", "60"))):
        others = [sorted(generator.choice(LENGTH, size=2, replace=False).tolist()) for _ in range(4)]
        drafted = [rounded(rollout_of(request_of(n), other_at=[p for p in at if p > 0])) for n, at in enumerate(others)]
        found = compared(drafted)
        num_ties = num_errors = num_tokens = 0
        for number, at in enumerate(others):
            end = LENGTH
            for position in (p for p in at if p > 0):
                if close(number, range(len(PROMPT) + position)):
                    num_ties += 1
                else:
                    num_errors += 1
                    end = position + 1
                    break
            num_tokens += end
        assert (len(found.ties), len(found.errors), found.tokens) == (num_ties, num_errors, num_tokens), trial


def test_first_difference_can_be_reproduced() -> None:
    mine = rounded(rollout_of(request_of(1), other_at=[3]))
    (error,) = compared([mine]).errors
    assert error.position == 3 and error.request.seed == 1 and error.request.max_tokens == 1
    assert error.request.prompt_ids.tolist() == [*PROMPT, *mine.token_ids[:3]]
    assert (error.token, error.plain_token) == (
        mine.token_ids[3],
        draw(request_of(1), error.request.prompt_ids.tolist()),
    )


@pytest.mark.parametrize("change", [lambda ids: ids[:-4], lambda ids: np.append(ids, ids[-1:])])
def test_rollout_of_another_length_is_an_error(change) -> None:
    """A token after the end, or a rollout that ends too early, is equal in all tokens that both have."""
    rollout = rollout_of(request_of(1))
    ids: Tokens = change(rollout.token_ids)
    (error,) = compared([replace(rollout, token_ids=ids, logp=np.full(len(ids), -1.0, np.float32))]).errors
    assert -1 in (error.token, error.plain_token)


def test_wrong_log_probabilities_raise_the_noise_floor() -> None:
    """NaN too, which compares as no difference."""
    rollout = rollout_of(request_of(1))
    for wrong in (-3.0, np.nan):
        logp = rollout.logp.copy()
        logp[2] = wrong
        assert compared([replace(rollout, logp=logp)]).noise_floor > 1.0
