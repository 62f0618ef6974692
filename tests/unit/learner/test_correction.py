"""Correction against closed forms and properties that hold for any ratio."""

import math
import warnings
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contexts import arena_config
from paceline.config import CorrectionConfig
from paceline.learner.correction import (
    HISTOGRAM_EDGES,
    Ratios,
    correct,
    diagnose,
    drawn_by,
    gaps_by_engine,
    histogram,
    weights,
    worst_tokens,
)
from paceline.types import GroupId, RolloutId, Sample

KINDS = get_args(CorrectionConfig.model_fields["kind"].annotation)
any_ratio = st.floats(allow_nan=True, allow_infinity=True, width=32)
some_rollouts = st.lists(st.lists(any_ratio, max_size=6), min_size=1, max_size=5)
finite_rollouts = st.lists(st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=6), min_size=1, max_size=5)


def ratios_of(rows: list[list[float]]) -> Ratios:
    return Ratios.of([np.zeros(len(row), np.float64) for row in rows], [np.array(row, np.float64) for row in rows])  # pyright: ignore[reportArgumentType]


def config(kind: str, **values: float) -> CorrectionConfig:
    return CorrectionConfig.model_validate({"kind": kind, **values})


def sample_of(logp: list[float], *, engine: str = "a", index: int = 0) -> Sample:
    return Sample(
        token_ids=np.arange(100, 103 + len(logp), dtype=np.int32),
        num_prompt_tokens=3,
        logp=np.array(logp, np.float32),
        advantage=1.0,
        engine=engine,
        rollout_id=RolloutId(GroupId(7), index),
    )


# Closed forms.


def test_bernoulli_diagnostics_are_the_divergences_of_two_coins() -> None:
    """An engine that gives heads p and a learner that gives q, over all outcomes in their exact proportion."""
    p, q, num = 0.25, 0.4, 4000
    heads = round(p * num)
    rows = [[math.log(q / p)] * heads + [math.log((1 - q) / (1 - p))] * (num - heads)]
    found = diagnose(ratios_of(rows))
    kl = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    chi_square = (p - q) ** 2 / p + (p - q) ** 2 / (1 - p)
    assert found.k1 == pytest.approx(kl)
    assert found.k3 == pytest.approx(kl), "k1 and k3 agree where the mean ratio is exactly 1"
    assert found.ratio_mean == pytest.approx(1)
    assert found.chi_square == pytest.approx(chi_square)
    assert found.effective_share == pytest.approx(1 / (1 + chi_square))
    assert found.perplexity_ratio == pytest.approx(math.exp(kl))


def test_gaussian_diagnostics_are_those_of_a_log_normal_ratio() -> None:
    """log rho ~ N(-s^2/2, s^2), the ratio of two unit Gaussians s apart: KL s^2/2, chi-square e^(s^2) - 1."""
    s, num = 0.5, 400_000
    log_ratio = np.random.default_rng(0).normal(-(s**2) / 2, s, num)
    found = diagnose(ratios_of([log_ratio.tolist()]))
    assert found.k1 == pytest.approx(s**2 / 2, rel=0.02)
    assert found.k3 == pytest.approx(s**2 / 2, rel=0.02)
    assert found.chi_square == pytest.approx(math.expm1(s**2), rel=0.03)
    assert found.effective_share == pytest.approx(math.exp(-(s**2)), rel=0.02)
    assert found.quantiles["p50"] == pytest.approx(math.exp(-(s**2) / 2), rel=0.01)
    above, below = (0.5 * math.erfc((math.log(2) + sign * s**2 / 2) / (s * math.sqrt(2))) for sign in (1, -1))
    assert found.clip_share == pytest.approx(above + below, rel=0.05)


def test_truncated_weights_undo_the_gap_up_to_the_cap() -> None:
    """Under a Bernoulli engine the weighted mean of any f is the learner's mean, if no ratio is above the cap."""
    p, q = 0.25, 0.4
    weight = weights(ratios_of([[math.log(q / p), math.log((1 - q) / (1 - p))]]), config("token-tis"))
    assert p * weight[0] * 7 + (1 - p) * weight[1] * 3 == pytest.approx(q * 7 + (1 - q) * 3)
    capped = weights(ratios_of([[math.log(q / p), math.log((1 - q) / (1 - p))]]), config("token-tis", cap=1.5))
    assert capped.tolist() == pytest.approx([1.5, 0.8])


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("none", [1, 1, 1, 1, 1]),
        ("recompute", [1, 1, 1, 1, 1]),
        ("token-tis", [2, 0.5, 1.5, 1, 1]),
        ("sequence-tis", [2, 2, 2, 1, 1]),
        ("token-mis", [0, 0.5, 1.5, 1, 1]),
        ("sequence-mis", [0, 0, 0, 1, 1]),
        ("geometric-mis", [0, 0, 0, 1, 1]),
    ],
)
def test_presets_on_two_rollouts(kind: str, expected: list[float]) -> None:
    """Ratios 4, 0.5, 1.5 (product 3) and 1, 1."""
    rows = [[math.log(4), math.log(0.5), math.log(1.5)], [0.0, 0.0]]
    assert weights(ratios_of(rows), config(kind)).tolist() == pytest.approx(expected)


def test_geometric_mask_does_not_grow_with_length() -> None:
    """The same gap per token masks a long rollout in sequence-mis and not in geometric-mis."""
    rows = [[0.005] * 10, [0.005] * 1000]
    assert weights(ratios_of(rows), config("sequence-mis"))[[0, -1]].tolist() == pytest.approx([math.exp(0.05), 0])
    assert weights(ratios_of(rows), config("geometric-mis"))[[0, -1]].tolist() == pytest.approx([math.exp(0.005)] * 2)


# Properties at any ratio.


@given(some_rollouts)
def test_nothing_overflows_at_any_ratio(rows: list[list[float]]) -> None:
    ratios = ratios_of(rows)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kind in KINDS:
            weight = weights(ratios, config(kind))
            assert np.isfinite(weight).all() and (weight >= 0).all()
            assert len(weight) == sum(len(row) for row in rows)
            if kind != "none":
                assert (weight <= 2).all()
        found = diagnose(ratios)
        histogram(ratios)
    finite = sum(math.isfinite(value) for row in rows for value in row)
    assert (found.num_tokens, found.num_not_finite) == (finite, sum(len(row) for row in rows) - finite)
    if finite:
        assert all(math.isfinite(value) for value in found.metrics().values())


@given(finite_rollouts)
def test_k3_is_no_less_than_zero_and_the_effective_share_is_a_share(rows: list[list[float]]) -> None:
    found = diagnose(ratios_of(rows))
    assert found.k3 >= 0 and found.chi_square >= 0
    assert 0 < found.effective_share <= 1
    assert 0 <= found.clip_share <= 1
    assert sum(histogram(ratios_of(rows))) == sum(len(row) for row in rows)


@given(finite_rollouts)
def test_masks_leave_kept_weights_alone(rows: list[list[float]]) -> None:
    ratios = ratios_of(rows)
    token = np.exp(ratios.clamped_N)
    kept = weights(ratios, config("token-mis"))
    assert np.array_equal(kept[kept > 0], token[kept > 0])
    assert ((token[kept == 0] < 0.5) | (token[kept == 0] > 2)).all()
    truncated, geometric = (weights(ratios, config(kind)) for kind in ("token-tis", "geometric-mis"))
    assert np.array_equal(geometric[geometric > 0], truncated[geometric > 0])


def test_one_nan_costs_its_own_token_or_rollout_and_no_other() -> None:
    rows = [[0.1, math.nan], [0.1, 0.1]]
    assert (weights(ratios_of(rows), config("token-tis")) > 0).tolist() == [True, False, True, True]
    assert (weights(ratios_of(rows), config("sequence-tis")) > 0).tolist() == [False, False, True, True]


# What goes to the learner and to the reader.


def test_without_correction_samples_go_through_untouched() -> None:
    samples = [sample_of([-1.0, -2.0])]
    assert correct(samples, [np.array([-1.5, -2.0], np.float32)], config("none")) == samples


def test_corrected_samples_carry_the_learners_logp_and_the_weight_of_their_own_tokens() -> None:
    samples = [sample_of([-1.0]), sample_of([]), sample_of([-1.0, -3.0])]
    learner_logp = [np.array(row, np.float32) for row in ([-1.5], [], [-1.0, -2.0])]
    first, empty, last = correct(samples, learner_logp, config("token-tis"))
    assert (
        first.old_logp is not None and first.weight is not None and last.weight is not None and empty.weight is not None
    )
    assert first.old_logp.tolist() == [-1.5]
    assert first.weight.tolist() == pytest.approx([math.exp(-0.5)])
    assert empty.weight.tolist() == []
    assert last.weight.tolist() == pytest.approx([1, 2])
    assert first.logp.tolist() == [-1.0], "what the engine said stays on record"


def test_gaps_are_told_apart_by_engine() -> None:
    samples = [sample_of([-1.0, -1.0], engine="a"), sample_of([-1.0, math.nan], engine="b"), sample_of([], engine="c")]
    learner_logp = [np.array(row, np.float32) for row in ([-1.0, -1.0], [-2.0, -1.0], [])]
    gaps = gaps_by_engine(samples, Ratios.of([s.logp for s in samples], learner_logp))
    assert gaps["a"].k3 == 0 and gaps["a"].num_tokens == 2
    assert gaps["b"].k3 == pytest.approx(math.exp(-1)) and gaps["b"].num_not_finite == 1
    assert gaps["c"].num_tokens == 0 and math.isnan(gaps["c"].k3)


def test_worst_tokens_come_with_their_context_and_a_nan_first() -> None:
    samples = [sample_of([-1.0, -1.0], index=0), sample_of([-1.0, math.nan, -1.0], index=1)]
    learner_logp = [np.array(row, np.float32) for row in ([-1.0, -4.0], [-1.0, -1.0, -1.1])]
    ratios = Ratios.of([s.logp for s in samples], learner_logp)
    first, second = worst_tokens(samples, learner_logp, ratios, num=2)
    assert (first["rollout"], first["place"], first["token"]) == ("7.0/train:1", 1, 104)
    assert (second["rollout"], second["before"], second["after"]) == ("7.0/train:0", [100, 101, 102, 103], [])
    assert worst_tokens([], [], Ratios.of([], [])) == []


def test_histogram_shows_one_bad_token_among_many() -> None:
    counts = histogram(ratios_of([[1e-7] * 999 + [3.0]]))
    assert counts[np.searchsorted(HISTOGRAM_EDGES, 3.0) - 1] == 1
    assert counts[np.searchsorted(HISTOGRAM_EDGES, 1e-7) - 1] == 999


def test_lengths_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="learner_logp"):
        Ratios.of([np.zeros(2, np.float32)], [np.zeros(3, np.float32)])


@pytest.mark.parametrize("setting", ["rollout.top_p=0.9", "rollout.top_k=50"])
def test_truncated_sampling_is_refused(setting: str) -> None:
    """Its ratios have a mean below 1, which no weight can make up for: what was cut off is never drawn."""
    with pytest.raises(ValueError, match=setting.partition("=")[0]):
        arena_config(["correction.kind=token-tis", setting])


def test_a_token_is_counted_by_the_version_that_drew_it_and_found_in_its_place() -> None:
    """With one version for a rollout across a sync, old tokens would be blamed on the engine, or new ones lost."""
    lengths, spans = (4, 3, 2), (((1, 3), (2, 1)), ((2, 3),), ((1, 2),))
    samples = [
        Sample(
            token_ids=np.arange(2 + length, dtype=np.int32),
            num_prompt_tokens=2,
            logp=np.zeros(length, np.float32),
            advantage=0.0,
            version_spans=drawn,
            engine="e",
        )
        for length, drawn in zip(lengths, spans, strict=True)
    ]
    learner = [np.array(row, np.float32) for row in ([9, 9, 9, 0.1], [0.1, 0.3, 0.2], [9, 9])]
    present = drawn_by(samples, 2)
    assert present.tolist() == [False] * 3 + [True] * 4 + [False] * 2
    ratios = Ratios.of([sample.logp for sample in samples], learner).only(present)
    assert gaps_by_engine(samples, ratios)["e"].num_tokens == 4
    worst = worst_tokens(samples, learner, ratios, num=2)
    assert [(row["place"], row["token"]) for row in worst] == [(1, 3), (2, 4)]
