"""Objective of the update: group advantages, the clipped policy loss (GRPO, DAPO's options) and the mismatch estimator.
Pure functions.

For a token with old log-probability o that the learner now gives log-probability l, the ratio is r = exp(l - o), and
the loss of the token with advantage A and weight w is

    -w * min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)

Without correction o is the engine's behaviour log-probability and w is 1. With it (correction.py) o is the learner's
own before the update, and w, a constant, makes up for the engine having drawn from a slightly different distribution.

GRPO (arXiv 2402.03300) has clip_low = clip_high and weighs every rollout the same. DAPO (arXiv 2503.14476) raises
clip_high, so that unlikely tokens can grow, and weighs every token the same, so that long rollouts are not diluted. The
sum is divided by a normaliser that the caller counts over the whole minibatch, all ranks included: cutting it into
micro-batches changes nothing.

Dimension suffixes: B rollouts, T positions of the padded batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from paceline.config import ObjectiveConfig

if TYPE_CHECKING:
    import torch

MAX_LOG_RATIO = 20.0
"""As in verl. A ratio of e^20 is outside of every band, and its square is still a number."""


def advantages(rewards: Sequence[float], kind: Literal["grpo", "centered"]) -> npt.NDArray[np.float64]:
    """Advantage of each rollout of one group: its reward above the group's mean, for `grpo` in units of the group's
    deviation."""
    reward_G = np.asarray(rewards, np.float64)
    # Tested on the rewards: the rounding of the mean leaves a tiny deviation in a group of equal rewards, and dividing
    # by it would turn rounding into advantages of size 1. A group without spread teaches nothing.
    if not len(reward_G) or reward_G.max() == reward_G.min():
        return np.zeros_like(reward_G)
    centered_G = reward_G - reward_G.mean()
    return centered_G if kind == "centered" else centered_G / reward_G.std()


def is_trained_on(rewards: Sequence[float], config: ObjectiveConfig) -> bool:
    """Whether a group takes part in the update: not if a reward of it failed (NaN), since the advantages of the others
    would be wrong, and not without a spread of rewards if the config drops such groups."""
    if np.isnan(rewards).any():
        return False
    return len(set(rewards)) > 1 or not config.drop_uniform_groups


def loss_normaliser(lengths: Sequence[int], loss: Literal["token", "sequence"]) -> float:
    """Divisor of a minibatch's loss: its response tokens, or its rollouts. `lengths` are response lengths."""
    return float(max(1, sum(lengths) if loss == "token" else len(lengths)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSums:
    """Sums over response tokens, so that micro-batches and ranks add up to what one pass over everything would have
    said."""

    num_tokens: float = 0.0
    loss: float = 0.0
    """Already divided by the normaliser: the loss of the minibatch is the plain sum of its parts."""
    ratio: float = 0.0
    clipped: float = 0.0
    """Tokens whose loss is held by the clip, and which therefore have no gradient."""
    k1: float = 0.0
    """Sum of o - l, the plain estimator of KL(old || policy)."""
    k3: float = 0.0
    """Sum of r - 1 - log r, the estimator with lower variance that is never negative."""
    entropy: float = 0.0

    def merge(self, other: LossSums) -> LossSums:
        return LossSums.of(mine + theirs for mine, theirs in zip(self.values(), other.values(), strict=True))

    def values(self) -> tuple[float, ...]:
        return astuple(self)

    @classmethod
    def of(cls, values: Iterable[float]) -> LossSums:
        """The inverse of values(), for what a reduction over ranks returns."""
        return cls(**{field.name: value for field, value in zip(fields(cls), values, strict=True)})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyLoss:
    loss: torch.Tensor
    """Scalar to differentiate."""
    sums: LossSums


def policy_loss(
    *,
    logp_BT: torch.Tensor,
    old_logp_BT: torch.Tensor,
    weight_BT: torch.Tensor,
    entropy_BT: torch.Tensor,
    advantage_B: torch.Tensor,
    mask_BT: torch.Tensor,
    normaliser: float,
    config: ObjectiveConfig,
) -> PolicyLoss:
    """Clipped surrogate loss of a padded micro-batch. `mask_BT` is true at response tokens; elsewhere any finite value
    goes."""
    import torch

    log_ratio_BT = logp_BT - old_logp_BT
    # exp overflows at 88 in float32, and one infinite token turns the gradient of the whole batch into NaN. A ratio of
    # e^20 is far outside every clip range, so nothing that could be learnt from is lost.
    log_ratio_BT = log_ratio_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_BT = log_ratio_BT.exp()
    free_BT = ratio_BT * advantage_B[:, None]
    held_BT = ratio_BT.clamp(1 - config.clip_low, 1 + config.clip_high) * advantage_B[:, None]
    token_loss_BT = -torch.minimum(free_BT, held_BT) * weight_BT.detach() * mask_BT
    if config.loss == "sequence":
        token_loss_BT = token_loss_BT / mask_BT.sum(1, keepdim=True).clamp(min=1)
    loss = token_loss_BT.sum() / normaliser

    def total(value_BT: torch.Tensor) -> torch.Tensor:
        return (value_BT.detach().double() * mask_BT).sum()

    values = torch.stack(  # one transfer to the host for all of them
        [
            mask_BT.double().sum(),
            loss.detach().double(),
            total(ratio_BT),
            total(held_BT < free_BT),
            total(-log_ratio_BT),
            total(ratio_BT - 1 - log_ratio_BT),
            total(entropy_BT),
        ]
    )
    return PolicyLoss(loss=loss, sums=LossSums.of(values.tolist()))


def k3_of(log_N: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """rho - 1 - log rho of each token. Rounding can leave a hair below zero, which no KL is."""
    return np.maximum(np.expm1(log_N) - log_N, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Gap between the engine's and the learner's log-probabilities of the same tokens; parts merge exactly."""

    count: int = 0
    k3_sum: float = 0.0
    max_abs: float = 0.0

    def merge(self, other: Mismatch) -> Mismatch:
        return Mismatch(
            count=self.count + other.count, k3_sum=self.k3_sum + other.k3_sum, max_abs=max(self.max_abs, other.max_abs)
        )


def mismatch(rollout_logp: npt.NDArray[np.floating], learner_logp: npt.NDArray[np.floating]) -> Mismatch:
    """Mismatch of one rollout. Its k3 is taken per token under the engine's distribution: KL(engine || learner)."""
    if rollout_logp.shape != learner_logp.shape:
        raise ValueError(
            f"learner_logp: got {learner_logp.shape}; must be {rollout_logp.shape}, a value for each token"
        )
    if not rollout_logp.size:
        return Mismatch()
    log_ratio_T = learner_logp.astype(np.float64) - rollout_logp.astype(np.float64)
    clamped_T = log_ratio_T.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)  # one lost token must not make the sum infinite
    return Mismatch(
        count=len(log_ratio_T), k3_sum=float(k3_of(clamped_T).sum()), max_abs=float(np.abs(log_ratio_T).max())
    )
