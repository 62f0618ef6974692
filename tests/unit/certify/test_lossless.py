"""The tests behind certify: they pass what is lossless, find each planted fault, and alarm as rarely as they say."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

from benchmarks.certify import interpreted
from benchmarks.planted import SAMPLER_FAULTS, SamplerFault, plant
from paceline.certify.lossless import (
    DEVIATIONS,
    Drafts,
    SamplerCell,
    chi_square,
    examine,
    num_cells,
    surprise,
    token_classes,
    two_sample,
    verdict,
)
from paceline.certify.subject import read_trace
from paceline.report.equality import first_difference
from paceline.rollout.internals.rejection_sampler import Verification
from paceline.rollout.speculation import refuse_lossy
from paceline.types import GroupId, RolloutId, Tokens


def reference_sample(step: Verification) -> torch.Tensor:
    """Sample speculatively, row by row: a slow, readable oracle for vLLM's sampler."""
    num_rows, num_drafts = step.draft_ids_BK.shape
    out_BL = torch.full((num_rows, num_drafts + 1), -1)
    for row in range(num_rows):
        p_LV = (step.logits_BLV[row].float() / step.temperature_B[row]).softmax(-1)
        for position in range(num_drafts):
            token = int(step.draft_ids_BK[row, position])
            p_V = p_LV[position]
            if step.proposal_BKV is None:
                q_V = torch.zeros_like(p_V)
                q_V[token] = 1.0
            else:
                q_V = step.proposal_BKV[row, position]
            if torch.rand(()) * q_V[token] < p_V[token]:
                out_BL[row, position] = token
                continue
            out_BL[row, position] = (p_V - q_V).clamp(min=0).multinomial(1)
            break
        else:
            out_BL[row, -1] = p_LV[-1].multinomial(1)
    return out_BL


def reference_draft(logits_BKV: torch.Tensor, temperature_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draft tokens and their distributions."""
    probs_BKV = (logits_BKV.float() / temperature_B[:, None, None]).softmax(-1)
    return probs_BKV.flatten(0, 1).multinomial(1).view(probs_BKV.shape[:2]), probs_BKV


def quick_sample(step: Verification) -> torch.Tensor:
    """reference_sample for many rows at once."""
    num_rows, num_drafts = step.draft_ids_BK.shape
    p_BLV = (step.logits_BLV / step.temperature_B[:, None, None]).softmax(-1)
    q_BKV = step.proposal_BKV
    if q_BKV is None:
        q_BKV = torch.nn.functional.one_hot(step.draft_ids_BK, p_BLV.shape[-1]).float()
    at_BK1 = step.draft_ids_BK[..., None]
    ratio_BK = (p_BLV[:, :-1].gather(2, at_BK1) / q_BKV.gather(2, at_BK1)).squeeze(-1)
    accepted_B = (torch.rand(num_rows, num_drafts) < ratio_BK).long().cumprod(1).sum(1)
    residual_BLV = p_BLV.clone()
    residual_BLV[:, :-1] -= q_BKV
    rows_B = torch.arange(num_rows)
    last_B = residual_BLV[rows_B, accepted_B].clamp(min=0).multinomial(1).squeeze(1)
    position_L = torch.arange(num_drafts + 1)
    out_BL = torch.cat([step.draft_ids_BK, last_B[:, None]], 1)
    out_BL[rows_B, accepted_B] = last_B
    return out_BL.masked_fill(position_L > accepted_B[:, None], -1)


def worst(cells: Iterable[SamplerCell]) -> float:
    return max(cell.excess for cell in cells)


def test_a_right_sampler_is_passed_at_every_position_and_temperature() -> None:
    cells = list(examine(quick_sample, reference_draft, num_rows=5000, lengths=(1, 3), seed=1))
    assert worst(cells) < 5
    covered = [(cell.drafts, cell.draft_length, cell.temperature, cell.position) for cell in cells]
    expected = [
        (drafts, length, temperature, position)
        for drafts in ("one-hot", "model-like", "adversarial")
        for length in (1, 3)
        for temperature in (0.6, 1.0)
        for position in range(length + 1)
    ]
    assert covered == expected


@pytest.mark.parametrize(
    ("fault", "kind", "length", "num_rows"),
    [
        ("residual", "one-hot", 1, 2000),
        ("residual", "model-like", 1, 4000),
        ("temperature", "model-like", 1, 2000),
        ("stale", "model-like", 3, 2000),
        ("accept", "adversarial", 1, 20_000),
    ],
)
def test_planted_fault_is_found(fault: SamplerFault, kind: Drafts, length: int, num_rows: int) -> None:
    """A test that cannot see a fault of this size proves nothing about its absence."""
    cells = list(
        examine(plant(quick_sample, fault), reference_draft, num_rows=num_rows, kinds=[kind], lengths=[length])
    )
    assert worst(cells) > DEVIATIONS


@pytest.mark.parametrize(("share", "least", "most"), [(1.0, 0.995, 1.0), (0.5, 0.0, 0.5)])
def test_effect_that_is_said_to_be_found_is_found(share: float, least: float, most: float) -> None:
    """An effect stated too small would promise what the test cannot do; too large would hide what it can."""
    num_tokens, num_trials, p_V = 2000, 4000, np.full(8, 1 / 8)
    cell = SamplerCell(
        drafts="one-hot",
        draft_length=1,
        temperature=1.0,
        position=0,
        num_tokens=num_tokens,
        statistic=0.0,
        degrees=7,
    )
    w = share * cell.effect_found
    moved_V = p_V * (1 + w * np.array([1, -1] * 4))
    assert np.sqrt(((moved_V - p_V) ** 2 / p_V).sum()) == pytest.approx(w)
    trials = np.random.default_rng(0).multinomial(num_tokens, moved_V, num_trials)
    found = [replace(cell, statistic=chi_square(counts_V, p_V)[0]).excess > DEVIATIONS for counts_V in trials]
    assert least <= np.mean(found) <= most


def test_as_many_rows_are_sampled_as_are_asked_for() -> None:
    """Interpreted, a row costs a tenth of a second: rounding 600 up to 1,000 would cost minutes."""
    cells = list(examine(quick_sample, reference_draft, num_rows=600, vocabulary=8, kinds=["model-like"], lengths=[2]))
    assert [cell.num_tokens for cell in cells if cell.position == 0] == [600, 600]
    assert len(cells) == num_cells(["model-like"], [2])


@pytest.mark.parametrize("fault", [None, "residual", "temperature", "stale"])
def test_effort_for_an_interpreted_sampler_suffices(fault: SamplerFault | None) -> None:
    """With fewer rows a position is left out, and a sampler that is right would be INCONCLUSIVE."""
    effort = interpreted()
    sampler = quick_sample if fault is None else plant(quick_sample, fault)
    for seed in range(3):
        cells = list(
            examine(
                sampler,
                reference_draft,
                num_rows=effort.sampler_rows,
                vocabulary=effort.vocabulary,
                kinds=effort.kinds,
                lengths=effort.lengths,
                seed=seed,
            )
        )
        if fault is None:
            assert len(cells) == num_cells(effort.kinds, effort.lengths)
        assert (worst(cells) > DEVIATIONS) == (fault is not None)


def test_every_fault_can_be_planted_by_name() -> None:
    assert set(SAMPLER_FAULTS) == set(get_args(SamplerFault))


def test_the_readable_sampler_is_right_and_the_quick_one_agrees() -> None:
    """The oracle itself, on a step small enough for a row at a time: every position against p by chi-square."""
    generator = torch.Generator().manual_seed(0)
    num_rows, num_drafts, vocabulary = 6000, 2, 8
    logits_LV = torch.randn((num_drafts + 1, vocabulary), generator=generator)
    draft_BKV = torch.randn((num_drafts, vocabulary), generator=generator).expand(num_rows, -1, -1)
    torch.manual_seed(0)
    temperature_B = torch.tensor([0.6, 1.0]).repeat(num_rows // 2)
    ids_BK, probs_BKV = reference_draft(draft_BKV, temperature_B)
    step = Verification(
        draft_ids_BK=ids_BK,
        proposal_BKV=probs_BKV,
        logits_BLV=logits_LV.expand(num_rows, -1, -1),
        temperature_B=temperature_B,
    )
    for given in (step, replace(step, proposal_BKV=None, draft_ids_BK=torch.ones_like(ids_BK))):
        for sampler in (reference_sample, quick_sample):
            ids_BL = sampler(given).numpy()
            for which, temperature in enumerate((0.6, 1.0)):
                p_LV = (logits_LV.double() / temperature).softmax(-1).numpy()
                for position in range(num_drafts + 1):
                    ids_B = ids_BL[which::2, position]
                    statistic, degrees = chi_square(
                        np.bincount(ids_B[ids_B >= 0], minlength=vocabulary), p_LV[position]
                    )
                    assert (statistic - degrees) / np.sqrt(2 * degrees) < 5, (sampler, temperature, position)


def test_rare_tokens_are_merged_until_expected_often_enough() -> None:
    """A bin with an expectation of a thousandth turns one unlucky token into a false alarm."""
    p_V = np.array([0.5, 0.3, 0.19, 0.009, 0.001])
    statistic, degrees = chi_square(np.array([500, 300, 190, 0, 10]), p_V)
    assert degrees == 2  # 0.5, 0.3, and all others, because 0.01 of 1000 is too few as well
    assert statistic == pytest.approx(0.0)


def sentences(rng: np.random.Generator, num: int, *, tokens: int = 12, heat: float = 1.0) -> Tokens:
    """A Markov chain over 12 tokens."""
    transition = np.random.default_rng(5).normal(size=(12, 12))
    p = np.exp(transition / heat)
    p /= p.sum(1, keepdims=True)
    ids_NT = np.zeros((num, tokens), np.int32)
    for position in range(1, tokens):
        draws = rng.random((num, 1))
        ids_NT[:, position] = (p[ids_NT[:, position - 1]].cumsum(1) < draws).sum(1).clip(max=11)
    return ids_NT


def test_two_sample_alarms_as_often_as_it_says() -> None:
    """Counts along a sequence depend on one another, so the usual chi-square would alarm far too often."""
    p_values = []
    for trial in range(400):
        rng = np.random.default_rng(trial)
        first, second = ([sentences(rng, 24) for _ in range(2)] for _ in range(2))
        p_values.append(two_sample(first, second, num_shuffles=99, seed=trial).p_value)
    found = np.array(p_values)
    for rate in (0.01, 0.05, 0.2, 0.5):  # four deviations of a binomial
        assert abs((found <= rate).mean() - rate) < 4 * np.sqrt(rate * (1 - rate) / len(found))


def test_two_sample_finds_a_wrong_temperature() -> None:
    rng = np.random.default_rng(0)
    first = [sentences(rng, 200) for _ in range(3)]
    second = [sentences(rng, 200, heat=0.7) for _ in range(3)]
    outcome = two_sample(first, second, num_shuffles=2999)
    assert outcome.p_value < 1e-3
    assert outcome.total_variation > outcome.noise_999 > outcome.noise > 0


def test_two_sample_finds_tokens_that_are_right_one_by_one_and_wrong_together() -> None:
    """Every marginal is uniform in both arms; in one of them the second token repeats the first."""
    rng = np.random.default_rng(0)
    first = rng.integers(0, 4, (200, 2)).astype(np.int32)
    second = np.repeat(rng.integers(0, 4, (200, 1)), 2, axis=1).astype(np.int32)
    outcome = two_sample([first], [second], num_shuffles=2999)
    assert outcome.p_value < 1e-3


def test_two_sample_statistic_is_the_sum_over_counted_events() -> None:
    """The quadratic form against the definition, by total variation of a case counted by hand."""
    first = np.array([[1, 2], [1, 3]], np.int32)
    second = np.array([[1, 2], [4, -1]], np.int32)
    # position 0: 1 has 2/2 against 1/2, 4 has 0 against 1/2: 0.5; position 1: 3 and the end differ by 1/2: 0.5
    assert two_sample([first], [second], num_shuffles=9).total_variation == pytest.approx(0.5)


def test_equal_samples_are_as_unremarkable_as_can_be() -> None:
    ids_NT = sentences(np.random.default_rng(0), 50)
    assert two_sample([ids_NT], [ids_NT], num_shuffles=99).p_value == 1.0


def test_surprise_is_a_standard_deviation_for_the_right_temperature_and_many_for_a_wrong_one() -> None:
    rng = np.random.default_rng(0)
    logits_NV = rng.normal(size=(20_000, 16)) * 2
    logp_NV = logits_NV - np.log(np.exp(logits_NV).sum(1, keepdims=True))
    entropy_N = -(np.exp(logp_NV) * logp_NV).sum(1)
    for heat, low, high in ((1.0, 0.0, 4.0), (0.9, 5.0, 100.0)):
        ids_N = (logits_NV / heat + rng.gumbel(size=logits_NV.shape)).argmax(1)
        logp_N = logp_NV[np.arange(len(ids_N)), ids_N]
        assert low <= abs(surprise([logp_N.astype(np.float32)], [entropy_N.astype(np.float32)])) <= high


def test_token_classes_follow_from_drafts_and_emitted_tokens() -> None:
    """First the prefill's token, then a rejection at the second draft, then all accepted; the end cuts the last step
    short."""
    steps = [(0, 0), (0, 1), (3, 2), (2, 3), (3, 4)]
    expected = ["plain", "accepted", "recovered", "accepted", "accepted", "bonus", "accepted", "accepted"]
    assert token_classes(steps, 8) == expected


def test_a_trace_that_lost_steps_is_refused() -> None:
    """Classes that are off by a step would blame or praise the wrong tokens."""
    with pytest.raises(ValueError, match="must be at least 5"):
        token_classes([(0, 1), (2, 3)], 5)


def test_trace_is_read_by_rollout(tmp_path: Path) -> None:
    trace = tmp_path / "steps.jsonl"
    first, second = RolloutId(GroupId(3), 0), RolloutId(GroupId(3), 1)
    lines = [
        {"requests": [[f"{first}-a1b2", 0, 1], [f"{second}-77f0", 0, 1]]},
        {"requests": [[f"{second}-77f0", 2, 3]]},
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_trace(trace) == {first: [(0, 1)], second: [(0, 1), (2, 3)]}


def test_first_difference() -> None:
    def ids(*tokens: int) -> Tokens:
        return np.array(tokens, np.int32)

    assert first_difference(ids(1, 2, 3), ids(1, 2, 3)) is None
    assert first_difference(ids(1, 2, 3), ids(1, 9)) == 1


def test_verdict_of_nothing_drafted_is_inconclusive_but_a_failure_decides() -> None:
    """An engine that never drafted passes every test; that must not read as a proof."""
    assert verdict(failed=[], missing=[]) == "LOSSLESS"
    assert verdict(failed=[], missing=["nothing was drafted"]) == "INCONCLUSIVE"
    assert verdict(failed=["two_sample_p"], missing=["nothing was drafted"]) == "NOT LOSSLESS"


@pytest.mark.parametrize(
    "settings",
    [
        {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5},
        {"synthetic_acceptance_rates": [0.9, 0.5]},
        {"acceptance_method": "typical_acceptance_sampler"},
        {"posterior_threshold": 0.1},
    ],
)
def test_lossy_settings_are_refused(settings: dict[str, object]) -> None:
    """The policy would be trained on tokens that it did not draw."""
    with pytest.raises(ValueError, match="speculative_config"):
        refuse_lossy({"method": "ngram", "num_speculative_tokens": 3, **settings})


def test_lossless_settings_are_accepted() -> None:
    refuse_lossy(
        {"method": "eagle3", "model": "drafter", "num_speculative_tokens": 3, "draft_sample_method": "probabilistic"}
    )
    refuse_lossy({"method": "ngram", "rejection_sample_method": "block"})
