"""Group advantages, the clipped policy loss (GRPO, DAPO's options) and the mismatch estimator, as pure functions.

A token has old log-probability o and current log-probability l. With ratio r = exp(l - o), advantage A and weight w its
loss is

    -w * min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)

Without correction o is the engine's log-probability and w is 1. With correction (correction.py) o is the learner's
log-probability before the update, and the constant w compensates for the engine's slightly different distribution.

GRPO (arXiv 2402.03300) has clip_low = clip_high and weights rollouts equally. DAPO (arXiv 2503.14476) raises clip_high,
so that unlikely tokens can grow, and weights tokens equally, so that long rollouts are not diluted. The sum is divided
by a normalizer over the whole minibatch and all ranks, so micro-batches do not change the result.

Dimension suffixes: B rollouts, T positions of the padded batch.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# torch.Tensor.tolist is untyped.

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
"""Clamp of log ratios, as in verl. A ratio of e^20 is outside every band, and its square is still finite."""


def advantages(rewards: Sequence[float], kind: Literal["grpo", "centered"]) -> npt.NDArray[np.float64]:
    """Return each reward minus the group's mean, for `grpo` divided by the group's standard deviation."""
    reward_G = np.asarray(rewards, np.float64)
    # Compare rewards, not the deviation: rounding of the mean leaves a tiny deviation in a group of equal rewards, and
    # dividing by it would turn rounding into advantages of size 1.
    if not len(reward_G) or reward_G.max() == reward_G.min():
        return np.zeros_like(reward_G)
    centered_G = reward_G - reward_G.mean()
    return centered_G if kind == "centered" else centered_G / reward_G.std()


def is_trained_on(rewards: Sequence[float], config: ObjectiveConfig) -> bool:
    """Return whether a group takes part in the update. A group with a failed reward (NaN) does not, because the other
    advantages would be wrong; a group of equal rewards does not if the config drops such groups."""
    if np.isnan(rewards).any():
        return False
    return len(set(rewards)) > 1 or not config.drop_uniform_groups


def loss_normalizer(lengths: Sequence[int], loss: Literal["token", "sequence"]) -> float:
    """Return the divisor of a minibatch's loss: its response tokens, or its rollouts."""
    return float(max(1, sum(lengths) if loss == "token" else len(lengths)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSums:
    """Sums over response tokens, which add up exactly over micro-batches and ranks."""

    num_tokens: float = 0.0
    loss: float = 0.0
    """Already divided by the normalizer, so the loss of a minibatch is the sum of its parts."""
    ratio: float = 0.0
    clipped: float = 0.0
    """Clipped tokens, which have no gradient."""
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
        """Return sums from `values()`, for example after a reduction over ranks."""
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
    normalizer: float,
    config: ObjectiveConfig,
) -> PolicyLoss:
    """Return the clipped surrogate loss of a padded micro-batch. Outside of `mask_BT` any finite value is allowed."""
    import torch

    log_ratio_BT = logp_BT - old_logp_BT
    # exp overflows at 88 in float32, and one infinite token would make the gradient of the whole batch NaN. A ratio of
    # e^20 is far outside every clip range, so the clamp changes no gradient.
    log_ratio_BT = log_ratio_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_BT = log_ratio_BT.exp()
    free_BT = ratio_BT * advantage_B[:, None]
    held_BT = ratio_BT.clamp(1 - config.clip_low, 1 + config.clip_high) * advantage_B[:, None]
    token_loss_BT = -torch.minimum(free_BT, held_BT) * weight_BT.detach() * mask_BT
    if config.loss == "sequence":
        token_loss_BT = token_loss_BT / mask_BT.sum(1, keepdim=True).clamp(min=1)
    loss = token_loss_BT.sum() / normalizer

    def total(value_BT: torch.Tensor) -> torch.Tensor:
        return (value_BT.detach().double() * mask_BT).sum()

    values = torch.stack(  # a single transfer to the host
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
    """Return rho - 1 - log rho of each token, without negative values from rounding."""
    return np.maximum(np.expm1(log_N) - log_N, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Gap between log-probabilities of engine and learner for the same tokens. Parts merge exactly."""

    count: int = 0
    k3_sum: float = 0.0
    max_abs: float = 0.0

    def merge(self, other: Mismatch) -> Mismatch:
        return Mismatch(
            count=self.count + other.count, k3_sum=self.k3_sum + other.k3_sum, max_abs=max(self.max_abs, other.max_abs)
        )


def mismatch(rollout_logp: npt.NDArray[np.floating], learner_logp: npt.NDArray[np.floating]) -> Mismatch:
    """Return the mismatch of one rollout, with k3 per token under the engine's distribution: KL(engine || learner)."""
    if rollout_logp.shape != learner_logp.shape:
        raise ValueError(
            f"learner_logp: got {learner_logp.shape}; must be {rollout_logp.shape}, a value for each token"
        )
    if not rollout_logp.size:
        return Mismatch()
    log_ratio_T = learner_logp.astype(np.float64) - rollout_logp.astype(np.float64)
    clamped_T = log_ratio_T.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)  # one bad token must not make the sum infinite
    return Mismatch(
        count=len(log_ratio_T), k3_sum=float(k3_of(clamped_T).sum()), max_abs=float(np.abs(log_ratio_T).max())
    )
