"""Correct the loss for the mismatch between engine and learner probabilities of the same tokens.

The engine draws a token with log-probability b. The learner computes o before the update and l during it. Without
correction the loss clips the ratio exp(l - b). With correction the clip acts on exp(l - o), the change by the update,
and the loss of the token is multiplied by a constant weight computed from

    rho = exp(o - b),        raw importance ratio of learner over engine; its mean under the engine is 1

The presets, with cap C and band [low, high]:

    recompute        1                                         no correction: the update depends on tokens only
    token-tis        min(rho_t, C)                             truncated: slightly biased, variance bounded by C
    sequence-tis     min(prod_t rho_t, C) for every token      unbiased for the rollout, variance grows with length
    token-mis        rho_t inside the band, 0 outside          masks outlier tokens (IcePop)
    sequence-mis     prod_t rho_t inside the band, 0 outside   masks whole rollouts
    geometric-mis    token-tis in rollouts with mean log rho   masks whole rollouts, independent of length
                     inside the band, 0 in other rollouts

A token with weight 0 still counts in the loss normalizer. Sources: truncation with C = 2, Yao et al. 2025, "Your
efficient RL framework secretly brings you off-policy RL training"; masks, Liu, Li et al. 2025, "When speed kills
stability". Diagnostics use raw ratios, because truncated ratios look healthy in a broken run.

Legend: N response tokens of all rollouts, concatenated; R rollouts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from paceline.config import CorrectionConfig
from paceline.learner.objective import MAX_LOG_RATIO, k3_of
from paceline.types import Floats, Sample

Doubles = npt.NDArray[np.float64]

_QUANTILES = {"p0.1": 0.001, "p1": 0.01, "p50": 0.5, "p99": 0.99, "p99.9": 0.999}
_CONTEXT = 8
"""Tokens shown on either side of a worst token."""
_DECADES = np.logspace(-5, 1, 25)
HISTOGRAM_EDGES: Doubles = np.concatenate([[-np.inf], -_DECADES[::-1], _DECADES, [np.inf]])
"""Bin edges of log ratios: four bins per decade on either side of a middle bin for rounding."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ratios:
    """Raw log ratios, learner over engine, of response tokens. Not clamped, possibly not finite."""

    log_N: Doubles
    rollout_N: npt.NDArray[np.int64]
    """Rollout index of each token."""
    place_N: npt.NDArray[np.int64]
    """Position of each token in its response."""
    num_rollouts: int

    @classmethod
    def of(cls, behavior_logp: Sequence[Floats], learner_logp: Sequence[Floats]) -> Ratios:
        lengths = [len(logp) for logp in behavior_logp]
        if [len(logp) for logp in learner_logp] != lengths:
            raise ValueError("learner_logp: got different lengths; must have a value for each response token")
        behavior_N, learner_N = (
            np.concatenate([*logps, np.zeros(0)]).astype(np.float64) for logps in (behavior_logp, learner_logp)
        )
        with np.errstate(invalid="ignore"):  # inf - inf is NaN, which is counted as not finite
            log_N = learner_N - behavior_N
        return cls(
            log_N=log_N,
            rollout_N=np.repeat(np.arange(len(lengths)), lengths),
            place_N=np.arange(len(log_N)) - np.repeat(np.cumsum(lengths, dtype=np.int64) - lengths, lengths),
            num_rollouts=len(lengths),
        )

    def only(self, chosen_N: npt.NDArray[np.bool_]) -> Ratios:
        return replace(
            self, log_N=self.log_N[chosen_N], rollout_N=self.rollout_N[chosen_N], place_N=self.place_N[chosen_N]
        )

    @property
    def clamped_N(self) -> Doubles:  # noqa: N802  a dimension suffix
        """Log ratios within +-MAX_LOG_RATIO; NaN stays NaN."""
        return self.log_N.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def drawn_by(samples: Sequence[Sample], version: int) -> npt.NDArray[np.bool_]:
    """Return for every response token whether this policy version drew it. Older tokens also differ by the updates
    since then, which is unrelated to the engine."""
    is_drawn: list[bool] = []
    lengths: list[int] = []
    for sample in samples:
        left = len(sample.logp)  # simulated samples have fewer logp than tokens
        for span_version, length in sample.version_spans or ((version, left),):
            is_drawn.append(span_version == version)
            lengths.append(min(length, left))
            left -= lengths[-1]
    return np.repeat(np.array(is_drawn, np.bool_), lengths)


def weights(ratios: Ratios, config: CorrectionConfig) -> Doubles:
    """Return the weight of each token in the loss, 0 if its ratio is not finite."""
    log_N, rollout_N = ratios.clamped_N, ratios.rollout_N
    lengths_R = np.bincount(rollout_N, minlength=ratios.num_rollouts)
    sum_R = np.bincount(rollout_N, log_N, ratios.num_rollouts)  # NaN affects only its own rollout
    token_N = np.exp(log_N)
    sequence_N = np.exp(sum_R.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO))[rollout_N]
    geometric_N = np.exp(sum_R / np.maximum(1, lengths_R))[rollout_N]
    low, high = config.band
    match config.kind:
        case "none" | "recompute":
            weight_N = np.ones_like(token_N)
        case "token-tis":
            weight_N = np.minimum(token_N, config.cap)
        case "sequence-tis":
            weight_N = np.minimum(sequence_N, config.cap)
        case "token-mis":
            weight_N = np.where((token_N >= low) & (token_N <= high), token_N, 0.0)
        case "sequence-mis":
            weight_N = np.where((sequence_N >= low) & (sequence_N <= high), sequence_N, 0.0)
        case "geometric-mis":
            weight_N = np.where((geometric_N >= low) & (geometric_N <= high), np.minimum(token_N, config.cap), 0.0)
    return np.nan_to_num(weight_N, nan=0.0)


def correct(samples: Sequence[Sample], learner_logp: Sequence[Floats], config: CorrectionConfig) -> list[Sample]:
    """Add the learner's log-probabilities and weights to the samples; kind `none` does not change them."""
    if config.kind == "none":
        return list(samples)
    weight_N = weights(Ratios.of([sample.logp for sample in samples], learner_logp), config).astype(np.float32)
    parts = np.split(weight_N, np.cumsum([len(logp) for logp in learner_logp])[:-1])
    return [
        replace(sample, old_logp=np.asarray(logp, np.float32), weight=weight)
        for sample, logp, weight in zip(samples, learner_logp, parts, strict=True)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Diagnostics of one step, from raw ratios; NaN without tokens."""

    num_tokens: int
    """Tokens with a finite ratio, the base of the other figures."""
    num_not_finite: int
    k1: float = math.nan
    """Mean of b - o: the plain estimate of KL(engine || learner), possibly negative."""
    k3: float = math.nan
    """Mean of rho - 1 - log rho: equal in expectation, never negative, with lower variance."""
    chi_square: float = math.nan
    """Mean of (rho - 1)^2, an estimate of the variance of the ratio."""
    effective_share: float = math.nan
    """Effective sample size over the number of tokens, in (0, 1]: (sum rho)^2 / (N sum rho^2)."""
    ratio_mean: float = math.nan
    """1 in expectation. Clearly lower values mean that the engine truncates its distribution (top-p, top-k)."""
    probability_error: float = math.nan
    """Mean of exp|log rho|, NeMo-RL's `token_mult_prob_error`; it accepts up to 1.05 between equal precisions."""
    perplexity_ratio: float = math.nan
    """Learner over engine, geometric mean over rollouts; above 1 the learner is less confident."""
    max_abs: float = math.nan
    clip_share: float = math.nan
    """Share of tokens with a ratio outside [1 / cap, cap]."""
    quantiles: Mapping[str, float]

    def metrics(self) -> dict[str, float]:
        """Return the figures without a metric of their own."""
        own = ("num_tokens", "k3", "max_abs", "quantiles")
        values = {field.name: float(getattr(self, field.name)) for field in fields(self) if field.name not in own}
        return values | {f"ratio_{name}": value for name, value in self.quantiles.items()}


def diagnose(ratios: Ratios, *, cap: float = 2.0) -> Diagnosis:
    """Summarize ratios, clamped to e^20 on either side so that one bad token does not dominate."""
    finite_N = np.isfinite(ratios.log_N)
    log_N = ratios.clamped_N[finite_N]
    num_tokens = len(log_N)
    if not num_tokens:
        unknown = dict.fromkeys(_QUANTILES, math.nan)
        return Diagnosis(num_tokens=0, num_not_finite=len(ratios.log_N), quantiles=unknown)
    excess_N = np.expm1(log_N)  # rho - 1 without cancellation near 1
    ratio_N, absolute_N = excess_N + 1, np.abs(log_N)
    count_R, sum_R = np.bincount(ratios.rollout_N[finite_N]), np.bincount(ratios.rollout_N[finite_N], log_N)
    return Diagnosis(
        num_tokens=num_tokens,
        num_not_finite=len(ratios.log_N) - num_tokens,
        k1=float(-log_N.mean()),
        k3=float(k3_of(log_N).mean()),
        chi_square=float(np.square(excess_N).mean()),
        effective_share=min(1.0, float(ratio_N.mean() ** 2 / np.square(ratio_N).mean())),
        ratio_mean=float(ratio_N.mean()),
        probability_error=float(np.exp(absolute_N).mean()),
        perplexity_ratio=float(np.exp(-(sum_R[count_R > 0] / count_R[count_R > 0]).mean())),
        max_abs=float(np.abs(ratios.log_N[finite_N]).max()),
        clip_share=float((absolute_N > np.log(cap)).mean()),
        quantiles=dict(zip(_QUANTILES, np.exp(np.quantile(log_N, list(_QUANTILES.values()))).tolist(), strict=True)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineGap:
    """Mismatch of one engine's rollouts in one step."""

    num_tokens: int
    """Tokens with a finite ratio."""
    num_not_finite: int
    k3: float
    """NaN without tokens."""


def gaps_by_engine(samples: Sequence[Sample], ratios: Ratios) -> dict[str, EngineGap]:
    names = sorted({sample.engine for sample in samples})
    index_of = {name: i for i, name in enumerate(names)}
    engine_R = np.array([index_of[sample.engine] for sample in samples], np.int64)
    engine_N, finite_N = engine_R[ratios.rollout_N], np.isfinite(ratios.log_N)
    k3_N = np.where(finite_N, k3_of(np.where(finite_N, ratios.clamped_N, 0.0)), 0.0)
    count_E = np.bincount(engine_N, minlength=len(names))
    finite_E = np.bincount(engine_N, finite_N, len(names)).astype(int)
    k3_E = np.bincount(engine_N, k3_N, len(names))
    return {
        name: EngineGap(
            num_tokens=int(finite_E[i]),
            num_not_finite=int(count_E[i] - finite_E[i]),
            k3=float(k3_E[i] / finite_E[i]) if finite_E[i] else float("nan"),
        )
        for i, name in enumerate(names)
    }


def histogram(ratios: Ratios) -> list[int]:
    """Count tokens in each bin of HISTOGRAM_EDGES, without NaN."""
    return np.histogram(ratios.log_N[~np.isnan(ratios.log_N)], HISTOGRAM_EDGES)[0].tolist()


def worst_tokens(
    samples: Sequence[Sample], learner_logp: Sequence[Floats], ratios: Ratios, num: int = 5
) -> list[dict[str, object]]:
    """Return the tokens with the largest difference and their context, for debugging a large mismatch."""
    size_N = np.where(np.isnan(ratios.log_N), np.inf, np.abs(ratios.log_N))
    num = min(num, len(size_N))
    chosen = np.argpartition(size_N, len(size_N) - num)[len(size_N) - num :] if num else np.zeros(0, np.int64)
    records: list[dict[str, object]] = []
    for token in sorted(chosen.tolist(), key=lambda i: -size_N[i]):
        rollout = int(ratios.rollout_N[token])
        sample, place = samples[rollout], int(ratios.place_N[token])
        at = sample.num_prompt_tokens + place
        records.append(
            {
                "rollout": None if sample.rollout_id is None else str(sample.rollout_id),
                "engine": sample.engine,
                "place": place,
                "token": int(sample.token_ids[at]),
                "before": sample.token_ids[max(0, at - _CONTEXT) : at].tolist(),
                "after": sample.token_ids[at + 1 : at + 1 + _CONTEXT].tolist(),
                "engine_logp": float(sample.logp[place]),
                "learner_logp": float(learner_logp[rollout][place]),
            }
        )
    return records
