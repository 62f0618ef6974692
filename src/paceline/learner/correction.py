"""Correction of the mismatch: engine and learner give the same tokens different probabilities, and the loss makes up
for it.

A token is drawn by the engine with behaviour log-probability b. Before the update the learner gives it log-probability
o, and during the update l. Without correction the loss takes the clipped ratio exp(l - b) straight against the engine
(what verl calls bypass mode): the clip then also holds tokens that nobody moved, only because two programs round
differently. With correction the two gaps are taken apart (decoupled): the clip acts on exp(l - o), which is what the
update moved, and the loss of the token is multiplied by a weight made from

    rho = exp(o - b),        raw importance ratio of learner over engine; its mean under the engine is 1

The weight is data: no gradient flows through it. The presets, with cap C and band [low, high]:

    token-tis        min(rho_t, C)                             truncated: biased a little, variance bounded by C
    sequence-tis     min(prod_t rho_t, C) for every token      right for the whole rollout, noisier with its length
    token-mis        rho_t inside the band, 0 outside          masked: what is far off teaches nothing (IcePop)
    sequence-mis     prod_t rho_t inside the band, 0 outside   whole rollouts are left out
    geometric-mis    as token-tis in rollouts whose mean of log rho lies inside the band, 0 in the others; does not
                     depend on length

A token with weight 0 still counts in the loss's normaliser. Sources: truncation with C = 2, Yao et al. 2025, "Your
efficient RL framework secretly brings you off-policy RL training"; masks, Liu, Li et al. 2025, "When speed kills
stability"; presets under the same names in verl (docs/algo/rollout_corr.md) and NeMo-RL
(`truncated_importance_sampling_type`).

All diagnostics are of raw ratios: what is logged after truncation looks healthy in a run that is not.

Legend: N response tokens of all rollouts, one after the other; R rollouts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from paceline.config import CorrectionConfig
from paceline.learner.objective import MAX_LOG_RATIO, k3_of
from paceline.types import Floats, Sample

Doubles = npt.NDArray[np.float64]

_QUANTILES = {"p0.1": 0.001, "p1": 0.01, "p50": 0.5, "p99": 0.99, "p99.9": 0.999}
_CONTEXT = 8
"""Tokens shown on either side of a worst one."""
_DECADES = np.logspace(-5, 1, 25)
HISTOGRAM_EDGES: Doubles = np.concatenate([[-np.inf], -_DECADES[::-1], _DECADES, [np.inf]])
"""Bin edges of log ratios: four bins a decade on either side of a middle bin that is rounding. One bad token among
millions is seen."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ratios:
    """Raw log-ratios, learner over engine, of the response tokens of some rollouts. Not clamped, perhaps not finite."""

    log_N: Doubles
    rollout_N: npt.NDArray[np.int64]
    """Index of each token's rollout."""
    place_N: npt.NDArray[np.int64]
    """Place of each token in its response."""
    num_rollouts: int

    @classmethod
    def of(cls, behaviour_logp: Sequence[Floats], learner_logp: Sequence[Floats]) -> Ratios:
        lengths = [len(logp) for logp in behaviour_logp]
        if [len(logp) for logp in learner_logp] != lengths:
            raise ValueError(
                "learner_logp: got other lengths than the rollouts; must be a value for each response token"
            )
        behaviour_N, learner_N = (
            np.concatenate([*logps, np.zeros(0)]).astype(np.float64) for logps in (behaviour_logp, learner_logp)
        )
        with np.errstate(invalid="ignore"):  # two infinities make a NaN, which is counted as what it is
            log_N = learner_N - behaviour_N
        return cls(
            log_N=log_N,
            rollout_N=np.repeat(np.arange(len(lengths)), lengths),
            place_N=np.concatenate([np.arange(length) for length in (*lengths, 0)]),
            num_rollouts=len(lengths),
        )

    def only(self, chosen_N: npt.NDArray[np.bool_]) -> Ratios:
        """Those of the chosen tokens."""
        return replace(
            self, log_N=self.log_N[chosen_N], rollout_N=self.rollout_N[chosen_N], place_N=self.place_N[chosen_N]
        )

    @property
    def clamped_N(self) -> Doubles:  # noqa: N802  a dimension suffix
        """Log-ratios within +-MAX_LOG_RATIO; a NaN stays one."""
        return self.log_N.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def drawn_by(samples: Sequence[Sample], version: int) -> npt.NDArray[np.bool_]:
    """Tell for every response token whether the policy of this version has drawn it. Older tokens differ from what the
    learner gives them through the updates since then, which says nothing about the engine."""
    parts = [np.zeros(0, np.bool_)]
    for sample in samples:
        num_tokens = len(sample.logp)
        versions, lengths = zip(*(sample.version_spans or ((version, num_tokens),)), strict=True)
        parts.append(np.repeat(np.array(versions) == version, lengths)[:num_tokens])  # simulated ones have fewer logp
    return np.concatenate(parts)


def weights(ratios: Ratios, config: CorrectionConfig) -> Doubles:
    """Weight of each token in the loss. A token without a finite ratio has weight 0: nothing is known of it."""
    log_N, rollout_N = ratios.clamped_N, ratios.rollout_N
    lengths_R = np.bincount(rollout_N, minlength=ratios.num_rollouts)
    sum_R = np.bincount(rollout_N, log_N, ratios.num_rollouts)  # a NaN spoils its own rollout and no other
    token_N = np.exp(log_N)
    sequence_N = np.exp(sum_R.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO))[rollout_N]
    geometric_N = np.exp(sum_R / np.maximum(1, lengths_R))[rollout_N]
    low, high = config.band
    match config.kind:
        case "none":
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
    """Add the learner's own log-probabilities and the weights to the samples; kind `none` leaves them as they are."""
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
    """Diagnostics of one step, from raw ratios."""

    num_tokens: int
    """Tokens with a finite ratio; the figures below are taken over these."""
    num_not_finite: int
    k1: float
    """Mean of b - o: the plain estimate of KL(engine || learner), of either sign."""
    k3: float
    """Mean of rho - 1 - log rho: the same in expectation, never negative, and of lower variance."""
    chi_square: float
    """Mean of (rho - 1)^2, whose expectation is the variance of the ratio."""
    effective_share: float
    """Effective sample size over the number of tokens, in (0, 1]: (sum rho)^2 / (N sum rho^2)."""
    ratio_mean: float
    """1 in expectation. Clearly below it the engine truncates what it samples from (top-p, top-k)."""
    probability_error: float
    """Mean of exp|log rho|, NeMo-RL's `token_mult_prob_error`; it accepts up to 1.05 between equal precisions."""
    perplexity_ratio: float
    """Learner over engine, geometric mean over rollouts: above 1 the learner is less sure of what was sampled."""
    max_abs: float
    clip_share: float
    """Share of tokens whose ratio is outside [1 / cap, cap]."""
    quantiles: Mapping[str, float]
    """Quantiles of rho."""

    def metrics(self) -> dict[str, float]:
        values = {
            "k1": self.k1,
            "chi_square": self.chi_square,
            "effective_share": self.effective_share,
            "ratio_mean": self.ratio_mean,
            "probability_error": self.probability_error,
            "perplexity_ratio": self.perplexity_ratio,
            "clip_share": self.clip_share,
            "num_not_finite": float(self.num_not_finite),
        }
        return values | {f"ratio_{name}": value for name, value in self.quantiles.items()}


def diagnose(ratios: Ratios, *, cap: float = 2.0) -> Diagnosis:
    """Summarise ratios, clamped to e^20 on either side so that one lost token leaves the figures readable."""
    finite_N = np.isfinite(ratios.log_N)
    log_N = ratios.clamped_N[finite_N]
    num_tokens = len(log_N)
    if not num_tokens:
        nothing = dict.fromkeys(_QUANTILES, np.nan)
        none = np.nan
        return Diagnosis(
            num_tokens=0,
            num_not_finite=len(ratios.log_N),
            k1=none,
            k3=none,
            chi_square=none,
            effective_share=none,
            ratio_mean=none,
            probability_error=none,
            perplexity_ratio=none,
            max_abs=none,
            clip_share=none,
            quantiles=nothing,
        )
    excess_N = np.expm1(log_N)  # rho - 1 without the loss of digits that the difference has near 1
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
    """The mismatch of one engine's rollouts in one step."""

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
    """Count tokens in each bin of HISTOGRAM_EDGES; a NaN is in none."""
    return np.histogram(ratios.log_N[~np.isnan(ratios.log_N)], HISTOGRAM_EDGES)[0].tolist()


def worst_tokens(
    samples: Sequence[Sample], learner_logp: Sequence[Floats], ratios: Ratios, num: int = 5
) -> list[dict[str, object]]:
    """Where the two differ most, with what stands around it: the first thing to look at when the mismatch is too
    large."""
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
