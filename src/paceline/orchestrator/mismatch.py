"""Measure, correct and guard the mismatch of every step.

    samples, learner's logp ──▶ diagnose ──▶ guard.decide ──▶ correct ──▶ samples for the update
                                   │              │
                                   ▼              ▼
                          metrics, histogram,   events; on "stop" save the batch and end the run
                          worst tokens, floor

Engines are judged by tokens that the current policy drew: older tokens (asynchronous training) also differ by the
updates since then. Tokens that are not finite count at any age, and the correction covers all tokens.

The floor is the learner's difference to itself when it scores a hundredth of the tokens in another batch. A mismatch
near the floor is rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from paceline.config import Config, CorrectionConfig
from paceline.learner.batch import draw
from paceline.learner.correction import Ratios, correct, diagnose, drawn_by, gaps_by_engine, histogram, worst_tokens
from paceline.learner.guard import GuardDecision, GuardState, Level, decide, least_correction, save_batch
from paceline.learner.objective import k3_of
from paceline.metrics import Max, Mean, Sum
from paceline.orchestrator.journal import Journal, clock_s
from paceline.types import Floats, Learner, PacelineError, PendingGradients, Sample, Scores

_FLOOR_SHARE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Judgment:
    """The guard's decision on one step, and the arguments of `Learner.apply`."""

    decision: GuardDecision
    samples: Sequence[Sample]
    pending: PendingGradients | None
    """Gradients of the scoring pass, if it used the correction that was decided on."""


class MismatchMonitor:
    """Judges the samples of every step and keeps the guard's state."""

    def __init__(
        self, config: Config, learner: Learner, journal: Journal, *, can_raise: bool, save_to: Path | None
    ) -> None:
        """With `can_raise`, engines can restart in full precision. A stopped run saves its batch in `save_to`."""
        self._config, self._learner, self._journal = config, learner, journal
        # Engines restart between batches, and asynchronous training has no pause between batches.
        self._can_raise = can_raise and config.run.max_age == 0
        self._save_to = save_to
        self._state = GuardState()
        self._level = Level.OBSERVE

    @property
    def raised(self) -> bool:
        """True if the engines should run in full precision."""
        return self._state.raised

    @property
    def correction(self) -> CorrectionConfig:
        """Correction of the next samples, unless they change the guard's level."""
        acting = self._config.guard.mode == "act"
        return least_correction(self._config.correction, self._level if acting else Level.OBSERVE)

    def state(self) -> dict[str, Any]:
        return {"guard": asdict(self._state), "level": self._level}

    def restore(self, state: Mapping[str, Any]) -> None:
        guard = state["guard"]
        self._state = replace(GuardState(**guard), past=tuple(guard["past"]), level=Level(guard["level"]))
        self._level = Level(state["level"])

    async def judge(self, samples: Sequence[Sample], scores: Scores, *, version: int) -> Judgment:
        """Judge samples that the learner scored with policy `version`, and correct them."""
        began_s, learner_logp = clock_s(), scores.logp
        ratios = self._of_engines(Ratios.of([sample.logp for sample in samples], learner_logp), samples, version)
        gaps = gaps_by_engine(samples, ratios)
        finite = bool(np.isfinite(np.concatenate([*learner_logp, np.zeros(0)])).all())
        state, decision = decide(self._state, gaps, learner_is_finite=finite, can_raise=self._can_raise)
        acting = self._config.guard.mode == "act"
        if not acting:  # nothing was done
            state = replace(state, raised=False, num_pushes=0, hold_steps=0)
        self._state = state
        self._measure(ratios)
        self._record_decision(decision)
        if len(ratios.log_N):
            self._journal.mismatch(
                counts=histogram(ratios),
                engines={name: gap.k3 for name, gap in gaps.items()},
                worst=worst_tokens(samples, learner_logp, ratios),
            )
        await self._floor(samples, learner_logp)
        if decision.level == Level.STOP and acting:
            self._stop(decision, samples, learner_logp)
        if not acting:
            decision = GuardDecision(level=Level.OBSERVE)
        correction = least_correction(self._config.correction, decision.level)
        corrected = correct(samples, learner_logp, correction)
        if weights := [sample.weight for sample in corrected if sample.weight is not None]:
            weight_N = np.concatenate(weights)
            self._journal.metrics.add("correction/weight_mean", Mean(float(weight_N.sum()), len(weight_N)))
            self._journal.metrics.add("correction/masked_share", Mean(float((weight_N == 0).sum()), len(weight_N)))
        self._journal.metrics.add("mismatch/cost_s", Sum(clock_s() - began_s))
        pending = scores.pending
        if pending is not None and pending.correction != correction:
            pending = None
        return Judgment(decision=decision, samples=corrected, pending=pending)

    def _of_engines(self, ratios: Ratios, samples: Sequence[Sample], version: int) -> Ratios:
        """Select the tokens that engines are judged by; record only the mean gap of the others."""
        present_N = drawn_by(samples, version)
        add = self._journal.metrics.add
        add("mismatch/judged_share", Mean(float(present_N.sum()), len(present_N)))
        older = diagnose(ratios.only(~present_N), cap=self._config.correction.cap)
        if older.num_tokens:
            add("mismatch/older_k3", Mean(older.k3))
        return ratios.only(present_N | ~np.isfinite(ratios.log_N))

    def _measure(self, ratios: Ratios) -> None:
        """Record the mismatch, if there are tokens."""
        if not len(ratios.log_N):
            return
        found, add = diagnose(ratios, cap=self._config.correction.cap), self._journal.metrics.add
        add("mismatch/k3", Mean(found.k3))
        add("mismatch/max_abs", Max(found.max_abs))
        self._journal.metrics.add_means({f"mismatch/{key}": value for key, value in found.metrics().items()})

    async def _floor(self, samples: Sequence[Sample], learner_logp: Sequence[Floats]) -> None:
        """Measure the difference between two scorings by the learner."""
        lengths = [len(sample.token_ids) for sample in samples]
        rng = np.random.default_rng((self._config.run.seed, self._journal.step))
        chosen = draw(lengths, _FLOOR_SHARE * sum(lengths), rng, fewest=1)
        again = (await self._learner.score([samples[i] for i in chosen])).logp
        gap = Ratios.of([learner_logp[i] for i in chosen], again)
        self._journal.metrics.add("mismatch/floor_k3", Mean(float(k3_of(gap.clamped_N).sum()), len(gap.log_N)))

    def _record_decision(self, decision: GuardDecision) -> None:
        add = self._journal.metrics.add
        add("guard/level", Max(decision.level))
        add("guard/raised", Max(float(self._state.raised)))
        add("guard/own_limit", Max(self._state.own_limit()))
        if decision.level != self._level or decision.level > Level.MASK or decision.precision is not None:
            self._journal.event(
                "guard",
                level=decision.level.words,
                cause=decision.cause,
                why=decision.why,
                engines=list(decision.engines),
                precision=decision.precision,
                acted=self._config.guard.mode == "act",
            )
        self._level = decision.level

    def _stop(self, decision: GuardDecision, samples: Sequence[Sample], learner_logp: Sequence[Floats]) -> None:
        where = "the batch was not saved"
        if self._save_to is not None:
            file = save_batch(self._save_to / f"stopped-step-{self._journal.step}", samples, learner_logp)
            where = f"the batch is in {file}"
        raise PacelineError(
            f"the guard stopped the run at step {self._journal.step}: {decision.why}; {where}. The worst tokens are in "
            "the last mismatch record of metrics.jsonl; `paceline certify logp` compares one engine with the learner; "
            "guard.mode=observe continues the run"
        )
