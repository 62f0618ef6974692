"""The guard: chooses what a run does when the mismatch grows, on a ladder from observing to stopping. Pure functions.

    observe ─▶ correct ─▶ mask ─▶ raise precision ─▶ skip the update, push again ─▶ stop with a saved batch
    nothing    token-tis  token-  FP8 engines are    the batch is not learnt from   a person has to look
    to do                 mis     restarted in BF16

Two causes look alike in one number and need different answers, so the mismatch is measured engine by engine:

    noise        Smooth and in all engines: quantisation, stale scales, kernels. It is judged by absolute limits on k3,
                 because it matters how wrong the gradient gets. Correction and precision help; pushing the same weights
                 again would not.
    broken sync  Sudden and in one engine: a tensor that did not arrive, layers swapped, memory gone bad. It is judged
                 against the other engines and the run's own past, long before it is large. A new push repairs it;
                 correction would hide it.

With one engine there are no others to compare with: there, a jump beyond every smooth growth counts as a broken sync,
and if pushing again does not help, precision is raised next. A number that is not finite is a broken engine, or, on the
learner's side, a broken policy, which no push repairs.

The absolute limits are those that others publish, as k3 in nats per token:

    correct 0.002   NeMo-RL asks for a look above a mean multiplicative probability error of 1.05 between equal
                    precisions (docs/adding-new-models.md): a Gaussian log-ratio of deviation 0.063 has a k3 of
                    0.063^2 / 2
    skip    0.1     verl's example alarm on KL (docs/algo/rollout_corr.md, with chi-square above 1 and effective samples
                    below 0.3)
    mask 0.01 and raise precision 0.03 stand between the two; these are ours

They are upper bounds. The run's own limits come from its first steps: median and median absolute deviation of log k3
over steps and engines. They then follow slowly, so that a policy that sharpens over a thousand steps is not an alarm. A
healthy FP8 run whose k3 is suddenly ten times what it was is in trouble well below the published limits.
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

from paceline.config import CorrectionConfig, GuardConfig
from paceline.files import atomic_directory, write_checksums
from paceline.learner.correction import EngineGap
from paceline.types import Floats, Sample

_DEVIATIONS = 4.0
"""Robust deviations of log k3 by which an engine must exceed its own past ..."""
_FACTOR = 3.0
"""... and the least factor on k3: the deviation of a few quiet steps is too small a yardstick."""
_TIMES_OTHERS = 3.0
"""Factor above the other engines' median k3 that makes an engine the odd one out."""
_STEEPNESS = {"correct": 1.0, "mask": 5 / 3, "raise_precision": 10 / 3}
"""The run's own limits of the rungs, as multiples of the first: at least 3, 5 and 10 times the past."""
_MIN_TOKENS = 256
"""Fewest tokens of an engine in a step by which it is judged; a mean over fewer says nothing."""
_RELEASE = 0.5
"""A rung is left when k3 is below this share of its limit: hysteresis."""
_PATIENCE = 2
"""Steps above the limit until precision is raised: restarting engines takes longer than a step."""
_FOLLOW = 0.05
"""Share by which the run's own past moves towards each new step."""


class Rung(IntEnum):
    """Rungs in the order of the ladder; the number is the metric `guard/rung`."""

    OBSERVE = 0
    CORRECT = 1
    MASK = 2
    RAISE_PRECISION = 3
    SKIP = 4
    STOP = 5

    @property
    def words(self) -> str:
        return self.name.lower().replace("_", " ")


Cause = Literal["none", "noise", "sync", "policy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardDecision:
    rung: Rung
    cause: Cause = "none"
    why: str = ""
    engines: tuple[str, ...] = ()
    """Suspected engines; empty when it is all of them."""
    update: bool = True
    """Whether to learn from the batch."""
    precision: Literal["raise", "lower"] | None = None
    """What to do with the engines' precision before the next push."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardState:
    """What the guard remembers from step to step."""

    past: tuple[float, ...] = ()
    """log k3 of each engine in each of the first steps."""
    num_steps: int = 0
    """Calm steps that have gone into `past`."""
    centre: float | None = None
    """Median of log k3; None until calibrated."""
    deviation: float = 0.0
    rung: Rung = Rung.OBSERVE
    num_hot: int = 0
    """Steps in a row above the limit for raising precision."""
    num_pushes: int = 0
    """Skipped updates in a row."""
    raised: bool = False
    num_calm: int = 0
    """Calm steps since precision was raised."""
    hold_steps: int = 0
    """Calm steps until precision is lowered again; doubled at every relapse."""

    def own_limit(self, config: GuardConfig) -> float:
        """Limit above which an engine's k3 is unlike its past; the published limit until the past is known."""
        if self.centre is None:
            return config.correct
        return math.exp(self.centre + max(_DEVIATIONS * self.deviation, math.log(_FACTOR)))

    def limits(self, config: GuardConfig) -> dict[Rung, float]:
        """Limits for a mismatch that all engines share."""
        published = {"correct": config.correct, "mask": config.mask, "raise_precision": config.raise_precision}
        if self.centre is not None:
            own = self.own_limit(config)
            published = {name: min(limit, _STEEPNESS[name] * own) for name, limit in published.items()}
        return {Rung[name.upper()]: limit for name, limit in published.items()} | {Rung.SKIP: config.skip}


def decide(
    state: GuardState,
    gaps: Mapping[str, EngineGap],
    config: GuardConfig,
    *,
    learner_is_finite: bool = True,
    can_raise: bool = False,
) -> tuple[GuardState, GuardDecision]:
    """Decide one step. `can_raise` says whether there is a higher precision and a way to it."""
    can_raise = can_raise and not state.raised
    if not learner_is_finite:
        why = "the learner's own log-probabilities are not finite: the policy is broken, and no push repairs it"
        return state, GuardDecision(rung=Rung.STOP, cause="policy", why=why, update=False)
    if broken := tuple(name for name, gap in gaps.items() if gap.num_not_finite):
        return _push_again(
            state, config, "sync", broken, f"log-probabilities of {_named(broken)} are not finite", can_raise
        )
    judged = {name: gap for name, gap in gaps.items() if gap.num_tokens >= _MIN_TOKENS} or {
        name: gap for name, gap in gaps.items() if gap.num_tokens
    }
    if not judged:
        return state, GuardDecision(rung=Rung.OBSERVE, why="no tokens to judge")
    if odd := _odd_ones(state, judged, config):
        worst = max(judged[name].k3 for name in odd)
        why = f"k3 of {_named(odd)} jumped to {worst:.1e}"
        why += " while the others' stayed" if len(judged) > 1 else ""
        return _push_again(state, config, "sync", odd, why, can_raise)
    k3 = sum(gap.k3 * gap.num_tokens for gap in judged.values()) / sum(gap.num_tokens for gap in judged.values())
    state, decision = _answer_noise(state, k3, config, can_raise)
    if decision.rung <= Rung.CORRECT and not state.raised:
        state = _remember(state, [math.log(max(gap.k3, 1e-12)) for gap in judged.values()], config)
    return state, decision


def _odd_ones(state: GuardState, judged: Mapping[str, EngineGap], config: GuardConfig) -> tuple[str, ...]:
    """Find engines whose mismatch is neither like their past nor like the others'."""
    limit = state.own_limit(config)
    if len(judged) == 1:
        sudden = math.inf if state.centre is None or state.raised else _STEEPNESS["raise_precision"] * limit
        return tuple(name for name, gap in judged.items() if gap.k3 > sudden)
    found = []
    for name, gap in judged.items():
        others = median(other.k3 for other_name, other in judged.items() if other_name != name)
        if gap.k3 > limit and gap.k3 > _TIMES_OTHERS * others:
            found.append(name)
    return tuple(found)


def _answer_noise(
    state: GuardState, k3: float, config: GuardConfig, can_raise: bool
) -> tuple[GuardState, GuardDecision]:
    """Choose the rung for a mismatch that all engines share."""
    limits = state.limits(config)
    reached = max((rung for rung, limit in limits.items() if k3 > limit), default=Rung.OBSERVE)
    if state.rung < Rung.SKIP:  # a push that helped leaves nothing behind
        held = (rung for rung in (Rung.CORRECT, Rung.MASK) if rung <= state.rung and k3 > _RELEASE * limits[rung])
        reached = max(reached, max(held, default=Rung.OBSERVE))
    why = ""
    if reached:
        relation = "above" if k3 > limits[reached] else "not yet below half of"
        why = f"k3 {k3:.1e} of all engines is {relation} {limits[reached]:.1e}"
    num_hot = state.num_hot + 1 if reached >= Rung.RAISE_PRECISION else 0
    state = replace(state, num_hot=num_hot)
    if reached == Rung.SKIP or num_hot >= _PATIENCE:
        if can_raise:
            return _raise(state, config, update=reached < Rung.SKIP, cause="noise", engines=(), why=why)
        why += "; precision is raised already" if state.raised else "; there is no higher precision to go to"
        if reached == Rung.SKIP:
            return _push_again(state, config, "noise", (), why, can_raise)
    rung = min(reached, Rung.MASK)
    state = replace(state, rung=rung, num_pushes=0)
    decision = GuardDecision(rung=rung, cause="noise" if rung else "none", why=why)
    if state.raised and not rung:
        state = replace(state, num_calm=state.num_calm + 1)
        if state.num_calm >= state.hold_steps:
            state = replace(state, raised=False, num_calm=0)
            decision = replace(decision, precision="lower", why=f"calm for {state.hold_steps} steps")
    return state, decision


def _raise(
    state: GuardState, config: GuardConfig, *, update: bool, cause: Cause, engines: tuple[str, ...], why: str
) -> tuple[GuardState, GuardDecision]:
    hold_steps = 2 * state.hold_steps or config.hold_steps
    state = replace(
        state, rung=Rung.RAISE_PRECISION, raised=True, num_calm=0, num_hot=0, num_pushes=0, hold_steps=hold_steps
    )
    rung = Rung.RAISE_PRECISION
    return state, GuardDecision(rung=rung, cause=cause, why=why, engines=engines, update=update, precision="raise")


def _push_again(
    state: GuardState, config: GuardConfig, cause: Cause, engines: tuple[str, ...], why: str, can_raise: bool
) -> tuple[GuardState, GuardDecision]:
    """Skip the batch and push; when that has not helped often enough, start engines again in full precision, and then
    stop."""
    num_pushes = state.num_pushes + 1
    if num_pushes <= config.max_pushes:
        state = replace(state, rung=Rung.SKIP, num_pushes=num_pushes)
        return state, GuardDecision(rung=Rung.SKIP, cause=cause, why=why, engines=engines, update=False)
    why += f"; {config.max_pushes} pushes did not help"
    if can_raise:
        return _raise(state, config, update=False, cause=cause, engines=engines, why=why)
    return replace(state, rung=Rung.STOP), GuardDecision(
        rung=Rung.STOP, cause=cause, why=why, engines=engines, update=False
    )


def _remember(state: GuardState, logs: Sequence[float], config: GuardConfig) -> GuardState:
    """Learn what is normal: from the first calm steps, and slowly ever after."""
    if state.centre is not None:
        return replace(state, centre=state.centre + _FOLLOW * (median(logs) - state.centre))
    past, num_steps = (*state.past, *logs), state.num_steps + 1
    if num_steps < config.calibration_steps:
        return replace(state, past=past, num_steps=num_steps)
    centre = median(past)
    deviation = 1.4826 * median(abs(value - centre) for value in past)
    return replace(state, past=(), num_steps=num_steps, centre=centre, deviation=deviation)


def least_correction(configured: CorrectionConfig, rung: Rung) -> CorrectionConfig:
    """The configured correction, or the one that the rung asks for if that is stronger."""
    if rung == Rung.CORRECT and configured.kind == "none":
        return configured.model_copy(update={"kind": "token-tis"})
    if rung >= Rung.MASK and not configured.kind.endswith("-mis"):
        return configured.model_copy(update={"kind": "token-mis"})
    return configured


def save_batch(directory: Path, samples: Sequence[Sample], learner_logp: Sequence[Floats]) -> Path:
    """Save everything that the decision was made from as batch.npz, which numpy reads without pickle, with its
    SHA256SUMS.

    Arrays of tokens hold those of all samples, one after the other; `version_spans` has rows of sample, version and
    number of tokens.
    """
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
