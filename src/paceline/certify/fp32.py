"""The FP32 part of `paceline certify`: greedy rollouts are equal, and the learner's scores agree by token class."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Any

import numpy as np

from paceline.certify.lossless import CLASSES, SURPRISE_LIMIT, TokenClass, surprise, token_classes
from paceline.certify.subject import Effort, Findings, Subject, generate
from paceline.config import LearnerConfig, ObjectiveConfig
from paceline.context import Context
from paceline.learner.fsdp import FsdpLearner
from paceline.learner.objective import Mismatch, mismatch
from paceline.report.equality import first_difference
from paceline.types import Rollout, RolloutId, RolloutRequest, Sample

_LOGP_LIMIT = 1e-4
_TIE = 1e-4
_NOT_A_LOGP = -1e6
_GREEDY = 1_000_000
"""Added to the group of a greedy request."""


def learner_part(found: Findings, subject: Subject, effort: Effort, context: Context, *, shift_logp: bool) -> None:
    # Without FP8 too: its gap to the learner is equal in the two engines above, and not caused by speculation.
    config = subject.config.rollout.engine.in_full_precision.model_copy(update={"dtype": "float32"})
    temperature = subject.config.rollout.temperature
    tokens = min(effort.long_tokens, subject.config.rollout.max_tokens)
    prompts = [subject.prompts[i % len(subject.prompts)] for i in range(effort.long_rollouts)]
    sampled, greedy = (
        [RolloutRequest.of(prompt, base + i, max_tokens=tokens, temperature=heat) for i, prompt in enumerate(prompts)]
        for base, heat in ((0, temperature), (_GREEDY, 0.0))
    )
    context.progress(f"fp32: {len(sampled)} sampled and {len(greedy)} greedy rollouts with speculation")
    speaking, steps = asyncio.run(
        generate(subject, config, [*sampled, *greedy], speculate=True, seed=2 * subject.seed + 3)
    )
    rollouts = [rollout for rollout in speaking if rollout.group_id.number < _GREEDY]
    plain: list[Rollout] = []
    if not shift_logp:
        context.progress(f"fp32: {len(greedy)} greedy rollouts without speculation")
        plain, _ = asyncio.run(generate(subject, config, greedy, speculate=False, seed=2 * subject.seed + 3))
    # After the engine: one GPU may not have room for both.
    learner_config = LearnerConfig(world_size=1, dtype="float32", microbatch_tokens=4096)
    with closing(
        FsdpLearner(subject.model_path, learner_config, ObjectiveConfig(), temperature=temperature)
    ) as learner:
        context.progress(f"fp32: scoring {sum(len(rollout.token_ids) for rollout in rollouts)} tokens with the learner")
        _score(found, learner, rollouts, steps, shift_logp=shift_logp)
        if not shift_logp:
            _greedy(found, learner, [r for r in speaking if r.group_id.number >= _GREEDY], plain, temperature)


def _score(
    found: Findings,
    learner: FsdpLearner,
    rollouts: Sequence[Rollout],
    steps: Mapping[RolloutId, Sequence[tuple[int, int]]],
    *,
    shift_logp: bool,
) -> None:
    scores = learner.score([_sample(rollout) for rollout in rollouts])
    gaps: dict[TokenClass, Mismatch] = dict.fromkeys(CLASSES, Mismatch())
    for rollout, logp_T in zip(rollouts, scores.logp, strict=True):
        # A broken sampler reports NaN, which would compare as no gap.
        engine_logp_T = np.nan_to_num(rollout.logp, nan=_NOT_A_LOGP, neginf=_NOT_A_LOGP)
        if shift_logp:
            engine_logp_T = np.roll(engine_logp_T, 1)
        class_T = np.array(token_classes(steps[rollout.id], len(rollout.token_ids)))
        for name in CLASSES:
            gaps[name] = gaps[name].merge(mismatch(engine_logp_T[class_T == name], logp_T[class_T == name]))
    for name in ("accepted", "recovered", "bonus"):
        if gaps[name].count:
            found.add(f"logp_max_abs_{name}", gaps[name].max_abs, ("<=", _LOGP_LIMIT))
        elif name == "bonus":
            found.notes.append("no draft was accepted whole, so the log-probabilities of bonus tokens were not seen")
        else:
            found.missing.append(f"no {name} token was seen")
    found.add("surprise_z", abs(surprise(scores.logp, scores.entropy)), ("<=", SURPRISE_LIMIT))
    found.details["logp_by_class"] = {name: asdict(gap) for name, gap in gaps.items()}


def _greedy(
    found: Findings, learner: FsdpLearner, spoken: Sequence[Rollout], plain: Sequence[Rollout], temperature: float
) -> None:
    """Count differences of greedy rollouts that are no ties to the learner; at a tie, rounding decides."""
    partings: list[dict[str, Any]] = []
    for mine, theirs in zip(spoken, plain, strict=True):
        position = first_difference(mine.token_ids, theirs.token_ids)
        if position is None:
            continue
        assert position < min(len(mine.token_ids), len(theirs.token_ids)), "greedy rollouts end alike, or differ before"
        either = [_sample(rollout, position + 1) for rollout in (mine, theirs)]
        first, second = (float(logp_T[-1]) for logp_T in learner.score(either).logp)
        gap = abs(first - second) * temperature
        partings.append({"rollout": mine.group_id.number - _GREEDY, "position": position, "logit_gap": gap})
    ties = sum(parting["logit_gap"] < _TIE for parting in partings)
    found.add("greedy_differences", len(partings) - ties, ("<=", 0.0))
    found.add("greedy_ties", ties)
    found.add("greedy_tokens", sum(len(rollout.token_ids) for rollout in plain))
    found.details["greedy_partings"] = partings


def _sample(rollout: Rollout, num_tokens: int | None = None) -> Sample:
    """Return rollouts for scoring, without the engine's log-probabilities: the learner accepts no NaN."""
    ids_T = rollout.token_ids[:num_tokens]
    return Sample(
        token_ids=np.concatenate([rollout.prompt_ids, ids_T]),
        num_prompt_tokens=len(rollout.prompt_ids),
        logp=np.zeros(len(ids_T), np.float32),
        advantage=0.0,
    )
