"""The simple selector: the rival that today's must beat has to be a good one, and run under the same scheduler."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import numpy as np
import pytest

from paceline.config import MeasuredSelector, SimpleSelector
from paceline.selector.select import Selector, Table, build_selector
from stepping_engine import GOOD, USELESS, Seconds, SteppingEngine, concave, cpu, gpu, long_tail, ridge, tiled

K, REQUESTS = 7, 64


def simple() -> Selector:
    return build_selector(SimpleSelector(), max_draft_length=K, max_num_requests=REQUESTS)


def measured() -> Selector:
    return build_selector(MeasuredSelector(), max_draft_length=K, max_num_requests=REQUESTS)


@pytest.mark.parametrize("shape", [cpu, gpu, ridge, tiled])
def test_default_selector_learns_in_half_the_steps(shape: Seconds) -> None:
    """Why it is the default and not this one. Once both have learned, the bench `rollout` cannot tell them apart."""
    assert _steps_to_learn(measured, shape) <= 0.5 * _steps_to_learn(simple, shape)
    assert _first_batch(measured, shape) >= 1.02 * _first_batch(simple, shape)


def _steps_to_learn(selector: Callable[[], Selector], shape: Seconds, window: int = 10) -> float:
    """Steps of one request, the tail of a batch, until `window` of them had 95 % of the best rate; mean over seeds."""
    found = []
    for seed in range(6):
        engine = SteppingEngine(shape, GOOD, seed=seed)
        best = max(engine.rate(1, k, 200) for k in range(K + 1))
        rates = engine.hold(selector(), 1, 200)[:, 1]
        good = np.convolve(rates / best, np.full(window, 1 / window), "valid") >= 0.95
        found.append(int(good.argmax()) if good.any() else len(good))
    return float(np.mean(found))


def _first_batch(selector: Callable[[], Selector], shape: Seconds) -> float:
    """Speed of a batch that begins with nothing learned, of the best; median over seeds."""
    return median(
        SteppingEngine(shape, GOOD, seed=seed).play(selector(), long_tail(seed)).of_hindsight for seed in range(6)
    )


@pytest.mark.parametrize(("shape", "goal"), [(cpu, 0.95), (concave, 0.9)])
def test_near_the_best_table_on_the_second_batch(shape: Seconds, goal: float) -> None:
    found = []
    for seed in range(3):
        selector, engine = simple(), SteppingEngine(shape, GOOD, seed=seed)
        SteppingEngine(shape, GOOD, seed=1000 + seed).play(selector, long_tail(100 + seed))
        hindsight = Table(engine.best_table(REQUESTS, K))
        best = SteppingEngine(shape, GOOD, seed=seed).play(hindsight, long_tail(seed)).of_hindsight
        found.append(engine.play(selector, long_tail(seed)).of_hindsight / best)
    assert median(found) >= goal


def test_useless_drafter_is_left_alone() -> None:
    selector = simple()
    SteppingEngine(cpu, USELESS, seed=7).play(selector, long_tail(7))
    assert SteppingEngine(cpu, USELESS, seed=8).play(selector, long_tail(8)).of_plain >= 0.93


def test_one_step_in_fifty_is_a_probe_of_a_neighbor() -> None:
    """More would cost speed, fewer would never notice that another length has become the best."""
    chosen = SteppingEngine(cpu, GOOD, seed=0, noise=0, outliers=0, drift=0).hold(simple(), 16, 1000)[100:, 0]
    usual = np.bincount(chosen.astype(int)).argmax()
    assert np.mean(chosen != usual) == pytest.approx(0.02, abs=0.005)
    assert set(chosen) <= {usual - 1, usual, usual + 1}


def test_slower_machine_does_not_make_it_change_its_mind() -> None:
    """Only the length in use is measured: without `TOGETHER` the others would look fast on a machine that slowed."""
    engine, selector = SteppingEngine(cpu, GOOD, seed=0, noise=0, outliers=0, drift=0), simple()
    engine.hold(selector, 4, 90)
    engine.true_seconds = lambda *at: 2.5 * cpu(*at)
    best = max(engine.rate(4, k, 800) for k in range(K + 1))
    assert engine.hold(selector, 4, 60)[:, 1].mean() >= 0.988 * best


def test_new_batch_size_begins_with_what_the_nearest_knows() -> None:
    engine, selector = SteppingEngine(cpu, GOOD, seed=0), simple()
    engine.hold(selector, 16, 50)
    assert engine.hold(selector, 4, 3)[0, 0] >= 3, "not with draft length 0, as from nothing"
    assert engine.hold(simple(), 4, 3)[0, 0] == 0
