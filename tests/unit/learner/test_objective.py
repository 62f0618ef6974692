"""The objective against values worked out by hand."""

import math

import numpy as np
import pytest
import torch

from paceline.config import ObjectiveConfig
from paceline.learner.objective import (
    LossSums,
    Mismatch,
    PolicyLoss,
    advantages,
    loss_normalizer,
    mismatch,
    policy_loss,
)


def loss_of(
    ratios: list[list[float]],
    advantage: list[float],
    config: ObjectiveConfig,
    *,
    logp_BT: torch.Tensor | None = None,
    weight_BT: torch.Tensor | None = None,
) -> PolicyLoss:
    """Loss of rollouts given by their ratios: every old log-probability is -1, shorter rows are padded."""
    width = max(len(row) for row in ratios)
    mask_BT = torch.tensor([[i < len(row) for i in range(width)] for row in ratios])
    if logp_BT is None:
        logp_BT = torch.tensor([[-1 + math.log(r) for r in row] + [0.0] * (width - len(row)) for row in ratios])
    return policy_loss(
        logp_BT=logp_BT,
        old_logp_BT=torch.where(mask_BT, -1.0, 0.0),
        weight_BT=torch.ones(mask_BT.shape) if weight_BT is None else weight_BT,
        entropy_BT=torch.where(mask_BT, 0.5, 9.0),
        advantage_B=torch.tensor(advantage),
        mask_BT=mask_BT,
        normalizer=loss_normalizer([len(row) for row in ratios], config.loss),
        config=config,
    )


def test_grpo_advantages_are_in_units_of_the_deviation() -> None:
    np.testing.assert_allclose(advantages([1, 0, 0, 1], "grpo"), [1, -1, -1, 1])
    np.testing.assert_allclose(
        advantages([1, 0, 0, 0], "grpo"), np.array([0.75, -0.25, -0.25, -0.25]) / math.sqrt(3 / 16)
    )


def test_centered_advantages_keep_the_scale_of_the_reward() -> None:
    np.testing.assert_allclose(advantages([2, 0, 0, 2], "centered"), [1, -1, -1, 1])


@pytest.mark.parametrize("kind", ["grpo", "centered"])
@pytest.mark.parametrize("rewards", [[1.0], [0.0] * 8, [0.1] * 3, [1 / 3] * 7, []])
def test_a_group_without_spread_has_no_advantage_and_no_nan(kind: str, rewards: list[float]) -> None:
    """0.1 three times has a mean that is not 0.1: dividing by that rounding would give advantages of size 1."""
    assert advantages(rewards, kind).tolist() == [0.0] * len(rewards)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "gradient"),
    [
        (1.0, 1.0, -1.0, -1.0),
        (1.1, 1.0, -1.1, -1.1),
        (1.5, 1.0, -1.2, 0.0),  # held above: the token has been raised enough
        (0.5, 1.0, -0.5, -0.5),  # too low for a good token: free to come back
        (0.5, -1.0, 0.8, 0.0),  # held below
        (1.5, -1.0, 1.5, 1.5),  # too high for a bad token: free to come back
        (1.5, 2.0, -2.4, 0.0),
    ],
)
def test_clip_holds_only_what_moved_far_enough(ratio: float, advantage: float, value: float, gradient: float) -> None:
    logp_BT = torch.tensor([[-1 + math.log(ratio)]], requires_grad=True)
    result = loss_of([[ratio]], [advantage], ObjectiveConfig(), logp_BT=logp_BT)
    result.loss.backward()
    assert logp_BT.grad is not None
    assert result.loss.item() == pytest.approx(value, rel=1e-6)
    assert logp_BT.grad.item() == pytest.approx(gradient, rel=1e-6)  # d r / d logp = r
    assert result.sums.clipped == (gradient == 0)


def test_clip_higher_moves_the_upper_bound_alone() -> None:
    dapo = ObjectiveConfig(clip_low=0.2, clip_high=0.28)
    assert loss_of([[1.25]], [1.0], dapo).loss.item() == pytest.approx(-1.25)
    assert loss_of([[1.25]], [1.0], ObjectiveConfig()).loss.item() == pytest.approx(-1.2)
    assert loss_of([[1.5]], [1.0], dapo).loss.item() == pytest.approx(-1.28)
    assert loss_of([[0.75]], [-1.0], dapo).loss.item() == pytest.approx(0.8)


def test_token_loss_weighs_tokens_and_sequence_loss_weighs_rollouts() -> None:
    ratios, advantage = [[1.0, 1.0, 1.0], [1.0]], [1.0, -2.0]
    assert loss_of(ratios, advantage, ObjectiveConfig(loss="token")).loss.item() == pytest.approx(-(3 * 1 - 2) / 4)
    assert loss_of(ratios, advantage, ObjectiveConfig(loss="sequence")).loss.item() == pytest.approx(-(1 - 2) / 2)


def test_statistics_are_sums_over_response_tokens_only() -> None:
    sums = loss_of([[1.0, 2.0], [0.5]], [1.0, 1.0], ObjectiveConfig()).sums
    assert sums.num_tokens == 3
    assert sums.ratio == pytest.approx(3.5)
    assert sums.clipped == 1
    assert sums.k1 == pytest.approx(0.0, abs=1e-6)  # -log 2 - log 0.5
    assert sums.k3 == pytest.approx((2 - 1 - math.log(2)) + (0.5 - 1 + math.log(2)), abs=1e-6)
    assert sums.entropy == pytest.approx(1.5)


@pytest.mark.parametrize("loss", ["token", "sequence"])
def test_parts_merge_to_the_whole(loss: str) -> None:
    config = ObjectiveConfig(loss=loss)  # pyright: ignore[reportArgumentType]
    ratios, advantage = [[1.1, 0.7, 1.4], [0.9]], [1.0, -1.0]
    whole = loss_of(ratios, advantage, config)
    normalizer = loss_normalizer([3, 1], config.loss)
    parts = LossSums()
    for row, value in zip(ratios, advantage, strict=True):
        part = policy_loss(
            logp_BT=torch.tensor([[-1 + math.log(r) for r in row]]),
            old_logp_BT=torch.full((1, len(row)), -1.0),
            weight_BT=torch.ones(1, len(row)),
            entropy_BT=torch.full((1, len(row)), 0.5),
            advantage_B=torch.tensor([value]),
            mask_BT=torch.ones(1, len(row), dtype=torch.bool),
            normalizer=normalizer,
            config=config,
        )
        parts = parts.merge(part.sums)
    assert parts.values() == pytest.approx(whole.sums.values(), abs=1e-6)


def test_a_ratio_beyond_float32_leaves_loss_and_gradient_finite() -> None:
    logp_BT = torch.tensor([[0.0, -200.0]], requires_grad=True)
    result = policy_loss(
        logp_BT=logp_BT,
        old_logp_BT=torch.tensor([[-200.0, 0.0]]),
        weight_BT=torch.ones(1, 2),
        entropy_BT=torch.zeros(1, 2),
        advantage_B=torch.tensor([-1.0]),
        mask_BT=torch.ones(1, 2, dtype=torch.bool),
        normalizer=2.0,
        config=ObjectiveConfig(),
    )
    result.loss.backward()
    assert logp_BT.grad is not None
    assert torch.isfinite(result.loss)
    assert torch.isfinite(logp_BT.grad).all()


def test_mismatch_by_hand_and_merged() -> None:
    rollout, learner = np.array([-1.0, -2.0], np.float32), np.array([-1.5, -2.0], np.float32)
    one = mismatch(rollout, learner)
    assert one.count == 2
    assert one.k3_sum == pytest.approx(math.exp(-0.5) - 1 + 0.5)
    assert one.max_abs == pytest.approx(0.5)
    both = one.merge(mismatch(np.array([-1.0], np.float32), np.array([-3.0], np.float32))).merge(Mismatch())
    assert both.count == 3
    assert both.k3_sum == pytest.approx(math.exp(-0.5) - 1 + 0.5 + math.exp(-2) - 1 + 2)
    assert both.max_abs == pytest.approx(2.0)


def test_mismatch_of_different_lengths_is_refused() -> None:
    """Broadcasting would compare one token with all others and call the gap small."""
    with pytest.raises(ValueError, match="learner_logp"):
        mismatch(np.zeros(3, np.float32), np.zeros(1, np.float32))


def test_weights_scale_loss_and_gradient_and_get_none_themselves() -> None:
    logp_BT = torch.tensor([[-1.0, -1.0, -1.0]], requires_grad=True)
    weight_BT = torch.tensor([[2.0, 0.0, 1.0]], requires_grad=True)
    result = loss_of([[1.0, 1.0, 1.0]], [1.0], ObjectiveConfig(), logp_BT=logp_BT, weight_BT=weight_BT)
    result.loss.backward()
    assert result.loss.item() == pytest.approx(-1.0)
    assert logp_BT.grad is not None and logp_BT.grad[0].tolist() == pytest.approx([-2 / 3, 0, -1 / 3])
    assert weight_BT.grad is None, "a gradient through the weight would reward making the mismatch larger"
