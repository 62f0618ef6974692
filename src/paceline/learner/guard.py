"""Guard: respond to a growing mismatch, from correcting the loss to stopping the run. Pure functions.

    observe ─▶ correct ─▶ mask ─▶ raise precision ─▶ skip the update, push again ─▶ stop and save the batch

Two causes look alike in one number and need different responses, so the mismatch is measured per engine:

    noise        Smooth, in all engines: quantization, stale scales, kernels. Judged by absolute limits on k3, because
                 they bound the error of the gradient. Correction and precision help; another push does not.
    broken sync  Sudden, in one engine: a missing tensor, swapped layers, bad memory. Judged against the other engines
                 and the run's past, long before it is large. Another push repairs it; correction would hide it.

A single engine has no others to compare with, so a jump beyond any smooth growth counts as a broken sync, and precision
is raised if pushes do not help. Values that are not finite mean a broken engine, or, from the learner, a broken policy.

The absolute limits follow published ones, as k3 in nats per token:

    correct 0.002   NeMo-RL investigates above a mean multiplicative probability error of 1.05 between equal precisions:
                    a Gaussian log ratio of deviation 0.063 has k3 = 0.063^2 / 2
    skip    0.1     verl's example alarm on KL (docs/algo/rollout_corr.md)
    mask 0.01 and raise precision 0.03 are our steps between the two

They are upper bounds: a healthy FP8 run with a sudden tenfold k3 is broken well below them. The run's own limits come
from median and median absolute deviation of log k3 in its first steps, and follow slowly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from statistics import median
from typing import Literal

import numpy as np

from paceline.config import CorrectionConfig
from paceline.files import atomic_directory, write_checksums
from paceline.learner.correction import EngineGap
from paceline.types import Floats, Sample

_DEVIATIONS = 4.0
"""Robust deviations of log k3 by which a suspected engine exceeds its past ..."""
_FACTOR = 3.0
"""... and the least factor on k3, because the deviation of a few quiet steps is too small."""
_TIMES_OTHERS = 3.0
"""Factor by which a suspected engine exceeds the other engines' median k3."""
_MIN_TOKENS = 256
"""Fewest tokens of an engine in a step to judge it by; a mean over fewer is too noisy."""
_RELEASE = 0.5
"""Share of its limit below which k3 ends a response: hysteresis."""
_PATIENCE = 2
"""Steps above the limit until precision is raised, because a restart takes longer than a step."""
_FOLLOW = 0.05
"""Weight of a new step in the moving median of log k3."""


class Level(IntEnum):
    """Responses to a mismatch, from weakest to strongest; the metric `guard/level`."""

    OBSERVE = 0
    CORRECT = 1
    MASK = 2
    RAISE_PRECISION = 3
    SKIP = 4
    STOP = 5

    @property
    def words(self) -> str:
        return self.name.lower().replace("_", " ")


LIMITS = {Level.CORRECT: 0.002, Level.MASK: 0.01, Level.RAISE_PRECISION: 0.03, Level.SKIP: 0.1}
"""k3 in nats per token above which a level is reached; the module's docstring names their sources."""
_STEEPNESS = {Level.CORRECT: 1.0, Level.MASK: 5 / 3, Level.RAISE_PRECISION: 10 / 3}
"""The run's own limits as multiples of the first: at least 3, 5 and 10 times the past."""
CALIBRATION_STEPS = 8
"""Calm steps from which a run learns its own limits."""
HOLD_STEPS = 20
"""Calm steps before engines return to FP8; doubled at every relapse."""
MAX_PUSHES = 2
"""Consecutive skipped updates before the run stops and saves the batch."""

Cause = Literal["none", "noise", "sync", "policy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardDecision:
    level: Level
    cause: Cause = "none"
    why: str = ""
    engines: tuple[str, ...] = ()
    """Suspected engines; empty if all are."""
    update: bool = True
    """False to skip the update."""
    precision: Literal["raise", "lower"] | None = None
    """Change of the engines' precision before the next push."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardState:
    past: tuple[float, ...] = ()
    """log k3 of each engine in each of the first steps."""
    num_steps: int = 0
    """Number of calm steps in `past`."""
    center: float | None = None
    """Median of log k3; None until calibrated."""
    deviation: float = 0.0
    level: Level = Level.OBSERVE
    num_hot: int = 0
    """Consecutive steps above the limit for raising precision."""
    num_pushes: int = 0
    """Consecutive skipped updates."""
    raised: bool = False
    num_calm: int = 0
    """Calm steps since precision was raised."""
    hold_steps: int = 0
    """Calm steps until precision is lowered; doubled at every relapse."""

    def own_limit(self) -> float:
        """Return the limit for an engine's k3 from its past; the published limit until calibrated."""
        if self.center is None:
            return LIMITS[Level.CORRECT]
        return math.exp(self.center + max(_DEVIATIONS * self.deviation, math.log(_FACTOR)))

    def limits(self) -> dict[Level, float]:
        """Return the limits for a mismatch of all engines."""
        if self.center is None:
            return LIMITS
        own = self.own_limit()
        return {level: min(limit, _STEEPNESS.get(level, math.inf) * own) for level, limit in LIMITS.items()}


def decide(
    state: GuardState, gaps: Mapping[str, EngineGap], *, learner_is_finite: bool = True, can_raise: bool = False
) -> tuple[GuardState, GuardDecision]:
    """Decide one step. With `can_raise`, engines can restart in a higher precision."""
    can_raise = can_raise and not state.raised
    if not learner_is_finite:
        why = "the learner's log-probabilities are not finite: the policy is broken, and no push repairs it"
        return state, GuardDecision(level=Level.STOP, cause="policy", why=why, update=False)
    if broken := tuple(name for name, gap in gaps.items() if gap.num_not_finite):
        return _push_again(state, "sync", broken, f"log-probabilities of {_named(broken)} are not finite", can_raise)
    judged = {name: gap for name, gap in gaps.items() if gap.num_tokens >= _MIN_TOKENS} or {
        name: gap for name, gap in gaps.items() if gap.num_tokens
    }
    if not judged:
        return state, GuardDecision(level=Level.OBSERVE, why="no tokens to judge")
    if odd := _odd_ones(state, judged):
        worst = max(judged[name].k3 for name in odd)
        why = f"k3 of {_named(odd)} jumped to {worst:.1e}"
        why += " while other engines are normal" if len(judged) > 1 else ""
        return _push_again(state, "sync", odd, why, can_raise)
    k3 = sum(gap.k3 * gap.num_tokens for gap in judged.values()) / sum(gap.num_tokens for gap in judged.values())
    state, decision = _answer_noise(state, k3, can_raise)
    if decision.level <= Level.CORRECT and not state.raised:
        state = _remember(state, [math.log(max(gap.k3, 1e-12)) for gap in judged.values()])
    return state, decision


def _odd_ones(state: GuardState, judged: Mapping[str, EngineGap]) -> tuple[str, ...]:
    """Return engines with a mismatch unlike their past and unlike the other engines."""
    limit = state.own_limit()
    if len(judged) == 1:
        sudden = math.inf if state.center is None or state.raised else _STEEPNESS[Level.RAISE_PRECISION] * limit
        return tuple(name for name, gap in judged.items() if gap.k3 > sudden)
    return tuple(
        name
        for name, gap in judged.items()
        if gap.k3 > limit
        and gap.k3 > _TIMES_OTHERS * median(other.k3 for place, other in judged.items() if place != name)
    )


def _answer_noise(state: GuardState, k3: float, can_raise: bool) -> tuple[GuardState, GuardDecision]:
    """Choose the level for a mismatch of all engines."""
    limits = state.limits()
    reached = max((level for level, limit in limits.items() if k3 > limit), default=Level.OBSERVE)
    if state.level < Level.SKIP:  # no hysteresis after a push that helped
        held = (
            level for level in (Level.CORRECT, Level.MASK) if level <= state.level and k3 > _RELEASE * limits[level]
        )
        reached = max(reached, max(held, default=Level.OBSERVE))
    why = ""
    if reached:
        relation = "above" if k3 > limits[reached] else "not yet below half of"
        why = f"k3 {k3:.1e} of all engines is {relation} {limits[reached]:.1e}"
    num_hot = state.num_hot + 1 if reached >= Level.RAISE_PRECISION else 0
    state = replace(state, num_hot=num_hot)
    if reached == Level.SKIP or num_hot >= _PATIENCE:
        if can_raise:
            return _raise(state, update=reached < Level.SKIP, cause="noise", engines=(), why=why)
        why += "; precision is already raised" if state.raised else "; there is no higher precision"
        if reached == Level.SKIP:
            return _push_again(state, "noise", (), why, can_raise)
    level = min(reached, Level.MASK)
    state = replace(state, level=level, num_pushes=0)
    decision = GuardDecision(level=level, cause="noise" if level else "none", why=why)
    if state.raised and not level:
        state = replace(state, num_calm=state.num_calm + 1)
        if state.num_calm >= state.hold_steps:
            state = replace(state, raised=False, num_calm=0)
            decision = replace(decision, precision="lower", why=f"calm for {state.hold_steps} steps")
    return state, decision


def _raise(
    state: GuardState, *, update: bool, cause: Cause, engines: tuple[str, ...], why: str
) -> tuple[GuardState, GuardDecision]:
    hold_steps = 2 * state.hold_steps or HOLD_STEPS
    state = replace(
        state, level=Level.RAISE_PRECISION, raised=True, num_calm=0, num_hot=0, num_pushes=0, hold_steps=hold_steps
    )
    level = Level.RAISE_PRECISION
    return state, GuardDecision(level=level, cause=cause, why=why, engines=engines, update=update, precision="raise")


def _push_again(
    state: GuardState, cause: Cause, engines: tuple[str, ...], why: str, can_raise: bool
) -> tuple[GuardState, GuardDecision]:
    """Skip the batch and push again; after too many pushes restart engines in full precision, and then stop."""
    level = Level.SKIP
    if state.num_pushes >= MAX_PUSHES:
        level, why = Level.STOP, f"{why}; {MAX_PUSHES} pushes did not help"
        if can_raise:
            return _raise(state, update=False, cause=cause, engines=engines, why=why)
    state = replace(state, level=level, num_pushes=state.num_pushes + 1)
    return state, GuardDecision(level=level, cause=cause, why=why, engines=engines, update=False)


def _remember(state: GuardState, logs: Sequence[float]) -> GuardState:
    """Calibrate on the first calm steps, then follow slowly."""
    if state.center is not None:
        return replace(state, center=state.center + _FOLLOW * (median(logs) - state.center))
    past, num_steps = (*state.past, *logs), state.num_steps + 1
    if num_steps < CALIBRATION_STEPS:
        return replace(state, past=past, num_steps=num_steps)
    center = median(past)
    deviation = 1.4826 * median(abs(value - center) for value in past)
    return replace(state, past=(), num_steps=num_steps, center=center, deviation=deviation)


def least_correction(configured: CorrectionConfig, level: Level) -> CorrectionConfig:
    """Return the configured correction, or the level's correction if that is stronger."""
    if level == Level.CORRECT and configured.kind in ("none", "recompute"):
        return configured.model_copy(update={"kind": "token-tis"})
    if level >= Level.MASK and not configured.kind.endswith("-mis"):
        return configured.model_copy(update={"kind": "token-mis"})
    return configured


def save_batch(directory: Path, samples: Sequence[Sample], learner_logp: Sequence[Floats]) -> Path:
    """Save the inputs of a decision as batch.npz, readable without pickle, with SHA256SUMS. Token arrays are
    concatenated over samples; `version_spans` has rows of sample, version and number of tokens."""
    with atomic_directory(directory) as partial:
        np.savez_compressed(
            partial / "batch.npz",
            token_ids=np.concatenate([sample.token_ids for sample in samples]),
            num_tokens=np.array([len(sample.token_ids) for sample in samples]),
            num_prompt_tokens=np.array([sample.num_prompt_tokens for sample in samples]),
            engine_logp=np.concatenate([sample.logp for sample in samples]),
            learner_logp=np.concatenate(learner_logp),
            advantage=np.array([sample.advantage for sample in samples]),
            version_spans=np.array(
                [(i, *span) for i, sample in enumerate(samples) for span in sample.version_spans], np.int64
            ).reshape(-1, 3),
            engine=np.array([sample.engine for sample in samples]),
            rollout_id=np.array([str(sample.rollout_id or "") for sample in samples]),
        )
        write_checksums(partial)
    return directory / "batch.npz"


def _named(engines: Sequence[str]) -> str:
    return ", ".join(engines[:3]) + (f" and {len(engines) - 3} more" if len(engines) > 3 else "")
