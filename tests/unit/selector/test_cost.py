"""The cost model must keep the ratios between draft lengths right on a machine that drifts, and follow a changed
drafter."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from paceline.selector.cost import Acceptance, CostModel, Step
from paceline.selector.cost_file import CostPoint, Costs, load_costs, save_costs
from paceline.selector.step_time import COSTS, StepTime
from stepping_engine import GOOD, USELESS, SteppingEngine, cpu, gpu

STEP = Step(
    num_requests=4,
    num_prefill_tokens=0,
    context_tokens=400,
    verified=2,
    drafted=2,
    seconds=0.1,
    proposed_at=(4, 4),
    accepted_at=(3, 1),
    num_emitted=8,
)


def trained(engine: SteppingEngine, *, num_steps: int = 400, seed: int = 0) -> CostModel:
    """Steps at batches and draft lengths of all sizes, as a run with many choices would show them."""
    model, random = CostModel(7), np.random.default_rng(seed)
    verified = 0
    for _ in range(num_steps // 2):
        num_requests, drafted = int(2 ** random.uniform(0, 6)), int(random.integers(0, 8))
        for _ in range(2):
            model.observe(engine.step(num_requests, verified, drafted, 200 * num_requests)[0])
            verified = drafted
    return model


def seconds_of(
    model: CostModel, num_requests: int, num_tokens: float, verified: int, drafted: int, context: float
) -> float:
    """Return the estimated seconds of a step, one by one: the readable twin of the model's curves."""
    x = model.step_time.features(num_requests, num_tokens, verified, drafted, context)
    return float(x @ np.exp(model.step_time.log_cost))


def ratio(model: CostModel, num_requests: int, k: int) -> float:
    context = 200 * num_requests
    return seconds_of(model, num_requests, num_requests * (k + 1), k, k, context) / seconds_of(
        model, num_requests, num_requests, 0, 0, context
    )


@pytest.mark.parametrize("shape", [cpu, gpu])
def test_ratios_between_draft_lengths_are_learned_under_noise_and_drift(shape) -> None:
    errors = []
    for seed in range(3):
        model = trained(SteppingEngine(shape, GOOD, seed=seed), seed=seed)
        for b in (1, 4, 16, 64):
            for k in (1, 3, 7):
                true = shape(b, b * (k + 1), k, k, 200 * b) / shape(b, b, 0, 0, 200 * b)
                errors.append(abs(math.log(ratio(model, b, k) / true)))
    assert np.median(errors) < 0.05
    assert np.max(errors) < 0.3


def test_first_pass_that_runs_without_drafts_too_is_learned_as_a_cost_of_every_step() -> None:
    """On vLLM's V2 runner EAGLE's first pass runs at k = 0 as well (target_dependent_ar/speculator.py, `propose`). A
    model that takes k = 0 for plain decoding would believe that the first draft token costs a pass more than it does,
    and stop drafting where drafts pay."""

    def first_pass_always(num_requests: int, num_tokens: int, verified: int, drafted: int, context: int) -> float:
        return 1e-3 * (max(6.0, 6.0 * num_tokens / 32) + 1.5 * max(drafted, 1))

    for seed in range(3):
        model = trained(SteppingEngine(first_pass_always, GOOD, seed=seed), num_steps=800, seed=seed)
        for b in (4, 16, 64):
            measured = first_pass_always(b, 2 * b, 1, 1, 200 * b) / first_pass_always(b, b, 0, 0, 200 * b)
            plain_s = first_pass_always(b, b, 0, 0, 200 * b) - 1.5e-3
            assumed = first_pass_always(b, 2 * b, 1, 1, 200 * b) / plain_s
            assert ratio(model, b, 1) == pytest.approx(measured, rel=0.08)
            assert assumed > 1.1 * measured, "the test could not tell them apart"


def test_curve_agrees_with_its_slow_twin() -> None:
    model = trained(SteppingEngine(cpu, GOOD, seed=1))
    tokens = 12 * np.linspace(1.0, 6.0, 8)
    seconds, share = model.step_time.curve(12, tokens, 900)
    for k in range(8):
        x = model.step_time.features(12, tokens[k], k, k, 900)
        assert seconds[k] == pytest.approx(x @ np.exp(model.step_time.log_cost), rel=1e-12)
        assert share[k] == pytest.approx(x * np.exp(model.step_time.log_cost) / seconds[k], rel=1e-12)
        assert share[k].sum() == pytest.approx(1)


def test_features_by_hand() -> None:
    x = dict(zip(COSTS, StepTime().features(10, 40, 3, 2, 700), strict=True))
    assert x == {
        "constant": 1,
        "request": 10,
        "token_from_0": 8,
        "token_from_8": 24,
        "token_from_32": 8,
        "token_from_128": 0,
        "token_from_512": 0,
        "verification": 1,
        "first_pass": 1,
        "first_pass_request": 10,
        "further_pass": 1,
        "further_pass_request": 10,
        "context": 700,
        "context_verified": 2100,
    }


def test_one_very_slow_step_changes_nothing_that_matters() -> None:
    model = trained(SteppingEngine(cpu, GOOD, seed=2))
    before = ratio(model, 16, 3), seconds_of(model, 16, 64, 3, 3, 3200)
    model.observe(
        replace(STEP, num_requests=16, verified=3, drafted=3, proposed_at=(16, 16, 16), seconds=100 * before[1])
    )
    assert ratio(model, 16, 3) == pytest.approx(before[0], rel=0.02)
    assert seconds_of(model, 16, 64, 3, 3, 3200) == pytest.approx(before[1], rel=0.1)


def test_slower_machine_is_not_read_as_dearer_drafts() -> None:
    """Only draft length 5 is seen while the machine slows down by 30 %; the other lengths must be taken to have slowed
    down too."""
    engine = SteppingEngine(cpu, GOOD, seed=3, drift=0.0)
    model = trained(engine)
    before, seconds = ratio(model, 8, 5), seconds_of(model, 8, 48, 5, 5, 1600)
    for _ in range(60):
        step = engine.step(8, 5, 5, 1600)[0]
        model.observe(replace(step, seconds=1.3 * step.seconds))
    assert seconds_of(model, 8, 48, 5, 5, 1600) == pytest.approx(1.3 * seconds, rel=0.1)
    assert ratio(model, 8, 5) == pytest.approx(before, rel=0.06)


@pytest.mark.parametrize("slowness", [2.0, 3.0])
def test_first_step_that_was_interrupted_does_not_bend_the_ratios(slowness: float) -> None:
    """It sets the scale, so that every later step looks fast. Steps that look fast at long drafts made these look
    cheap, and a selector then drafted 7 tokens at 16 requests, where 3 are best, for hundreds of steps."""
    engine = SteppingEngine(gpu, GOOD, seed=4, noise=0.05, outliers=0.0, drift=0.0)
    model = CostModel(7)
    for number, (verified, drafted) in enumerate([(0, 0), (0, 1), (1, 1), (1, 3), (3, 3), (3, 7), *[(7, 7)] * 20]):
        step = engine.step(16, verified, drafted, 1600)[0]
        model.observe(replace(step, seconds=step.seconds * (1.0 if number else slowness)))
    true = gpu(16, 128, 7, 7, 1600) / gpu(16, 16, 0, 0, 1600)
    assert ratio(model, 16, 7) == pytest.approx(true, rel=0.2)


def test_doubt_stays_bounded_and_covariance_sound_over_a_long_run() -> None:
    """Ten thousand steps at one place: doubt about all other places must not grow without limit, nor rounding break the
    filter."""
    model = CostModel(7)
    for i in range(10_000):
        model.observe(replace(STEP, seconds=0.1 * (1 + 0.1 * math.sin(i))))
    eigenvalues = np.linalg.eigvalsh(model.step_time.covariance)
    assert eigenvalues.min() > -1e-9
    assert eigenvalues.max() < 50
    assert seconds_of(model, 4, 12, 2, 2, 400) == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_impossible_times_are_refused_and_counted(seconds: float) -> None:
    model = CostModel(4)
    model.observe(replace(STEP, seconds=seconds))
    model.observe(replace(STEP, num_requests=0))
    assert model.num_refused == 2
    assert model.step_time.num_observed == 0


def test_prefill_teaches_acceptance_but_not_cost() -> None:
    model = CostModel(4)
    model.observe(replace(STEP, num_prefill_tokens=100))
    assert model.step_time.num_observed == 0
    model.acceptance.refresh()
    assert model.acceptance.conditional[0] == pytest.approx((3 + 2 * 0.5) / (4 + 2))


def test_acceptance_by_hand() -> None:
    """[3 of 4, then 1 of those 3], a prior of two trials, then of eight like the one before;
    the unknown third position is like the second."""
    acceptance = Acceptance(3)
    acceptance.observe(STEP)
    acceptance.refresh()
    first = (3 + 2 * 0.5) / 6
    second = (1 + 8 * first) / 11
    assert acceptance.conditional == pytest.approx([first, second, second])
    assert acceptance.accepted_length == pytest.approx(
        [1, 1 + first, 1 + first + first * second, 1 + first + first * second * (1 + second)]
    )


def test_what_was_not_proposed_counts_as_not_accepted_and_is_not_verified() -> None:
    """A drafter that proposes for a quarter of the requests gains a quarter, and costs a quarter of the tokens."""
    acceptance = Acceptance(2)
    for _ in range(200):
        acceptance.observe(replace(STEP, proposed_at=(1, 1), accepted_at=(1, 1)))
    acceptance.refresh()
    assert acceptance.accepted_length == pytest.approx([1, 1.25, 1.5], rel=0.02)
    assert acceptance.tokens_per_request == pytest.approx([1, 1.25, 1.5], rel=0.02)


@pytest.mark.parametrize(("before", "after"), [(GOOD, USELESS), (USELESS, GOOD), (GOOD, (0.5,) * 7)])
@pytest.mark.parametrize("num_requests", [1, 32])
def test_changed_drafter_is_followed_within_fifty_steps(before, after, num_requests: int) -> None:
    acceptance = Acceptance(7)
    for phase, num_steps in ((before, 300), (after, 50)):
        engine = SteppingEngine(cpu, phase, seed=5)
        for _ in range(num_steps):
            acceptance.observe(engine.step(num_requests, 3, 3, 100)[0])
    acceptance.refresh()
    true = 1 + np.cumprod(after[:3]).sum()
    assert acceptance.accepted_length[3] == pytest.approx(true, rel=0.25 if num_requests == 1 else 0.05)


def test_unchanged_drafter_is_not_called_changed() -> None:
    engine, acceptance = SteppingEngine(cpu, GOOD, seed=6), Acceptance(7)
    for i in range(3000):
        acceptance.observe(engine.step(1 + i % 40, 1 + i % 7, 1, 100)[0])
    assert acceptance.num_changes <= 1


def test_rate_of_the_outlook_is_the_formula() -> None:
    model = trained(SteppingEngine(cpu, GOOD, seed=7))
    outlook = model.outlook(6, 1200)
    survival = np.cumprod(model.acceptance.conditional)
    for k in range(8):
        seconds = seconds_of(model, 6, 6 * model.acceptance.tokens_per_request[k], k, k, 1200)
        rate = 6 * (1 + survival[:k].sum()) / seconds
        assert math.exp(outlook.log_rate_K[k]) == pytest.approx(rate)


def test_acceptance_gradient_agrees_with_finite_differences() -> None:
    model = trained(SteppingEngine(cpu, GOOD, seed=8))
    model.acceptance.refresh()
    h, small = np.array(model.acceptance.conditional), 1e-6
    for j in range(7):
        moved = h.copy()
        moved[j] *= math.exp(small)
        for k in range(8):
            change = math.log((1 + np.cumprod(moved[:k]).sum()) / (1 + np.cumprod(h[:k]).sum())) / small
            assert model.acceptance.gradient_KJ[k, j] == pytest.approx(change, abs=1e-5)


def test_deviation_covers_the_error() -> None:
    """Optimism by deviations is worth nothing if they are too small: at least two thirds of the errors within two of
    them."""
    inside = []
    for seed in range(6):
        engine = SteppingEngine(cpu, GOOD, seed=seed)
        model = trained(engine, num_steps=60, seed=seed)
        for b in (2, 8, 32):
            outlook = model.outlook(b, 200 * b)
            true = np.log([engine.rate(b, k, 200 * b) for k in range(8)])
            error = (outlook.log_rate_K - outlook.log_rate_K[3]) - (true - true[3])
            deviation = outlook.deviation_from(3)
            assert deviation[3] == 0
            inside += [abs(error[k]) < 2 * deviation[k] for k in range(8) if k != 3]
    assert np.mean(inside) > 0.67


def test_cost_file_comes_back_and_teaches_ratios(tmp_path: Path) -> None:
    points = tuple(
        CostPoint(
            num_requests=b,
            verified=k,
            drafted=k,
            context_tokens=200 * b,
            seconds=cpu(b, b * (k + 1), k, k, 200 * b),
            num_steps=20,
        )
        for b in (1, 8, 32, 64)
        for k in (0, 1, 3, 5, 7)
    )
    costs = Costs(points=points, acceptance=GOOD, num_trials=1000)
    save_costs(tmp_path / "costs.json", costs)
    assert load_costs(tmp_path / "costs.json") == costs
    model = CostModel(7, costs)
    for b in (1, 4, 16, 64):
        for k in (1, 4, 7):
            assert ratio(model, b, k) == pytest.approx(
                cpu(b, b * (k + 1), k, k, 200 * b) / cpu(b, b, 0, 0, 200 * b), rel=0.1
            )
    model.acceptance.refresh()
    assert model.acceptance.accepted_length[-1] == pytest.approx(4.29, rel=0.1)


def test_observing_is_cheap() -> None:
    """It runs in every engine step. About 20 microseconds on a quiet core; the bound leaves room for a loaded one."""
    model = trained(SteppingEngine(cpu, GOOD, seed=9))
    best = math.inf
    for _ in range(10):
        start = time.process_time()
        for _ in range(200):
            model.observe(STEP)
        best = min(best, (time.process_time() - start) / 200)
    assert best < 100e-6


def test_position_that_failed_a_few_times_is_not_written_off_for_ever() -> None:
    """As recorded: four drafts failed at position 6 after a change, nothing longer than five was asked for since, and
    the selector believed 0.24 where the drafter has 0.8."""
    acceptance = Acceptance(7)

    def step(accepted_at: tuple[int, ...]) -> Step:
        k = len(accepted_at)
        return Step(
            num_requests=5,
            num_prefill_tokens=0,
            context_tokens=500,
            verified=k,
            drafted=k,
            seconds=0.1,
            proposed_at=(5,) * k,
            accepted_at=accepted_at,
            num_emitted=5 + sum(accepted_at),
        )

    for _ in range(20):
        acceptance.observe(step((5, 5, 4, 4, 4)))
    acceptance.observe(step((5, 5, 4, 4, 4, 0, 0)))
    acceptance.refresh()
    assert acceptance.conditional[5] > 0.5, "one step of four requests is weak evidence"
    for _ in range(400):
        acceptance.observe(step((5, 5, 4, 4, 3)))
    acceptance.refresh()
    assert acceptance.conditional[5] > 0.65 and acceptance.conditional[6] > 0.65
