"""Figures of repeated measurements, their spread, and the load of the machine beside them."""

from __future__ import annotations

import numpy as np

from benchmarks.harness import Record, cpu_times, meanwhile


def test_figure_is_the_median_and_its_spread_the_whole_range():
    record = Record()
    record.median("odd", [5.0, 1.0, 2.0])
    record.median("even", [1.0, 2.0])
    assert record.figures == {"odd": 2.0, "even": 1.5}
    assert record.spread == {"odd": 4.0, "even": 1.0}


def with_ratios(*ratios: float) -> Record:
    record = Record()
    record.ratios({"speedup": ratios})
    return record


def test_spread_of_paired_ratios_is_the_interval_of_their_median_and_not_their_range():
    """One disturbed pair widens the range to itself, however many pairs say otherwise."""
    ratios = [2.0 + 0.01 * (number % 10) for number in range(40)] + [5.0]
    record = with_ratios(*ratios)
    assert record.figures == {"speedup": 2.05}
    found = record.details["paired"]["speedup"]
    assert 2.02 <= found["low"] <= 2.05 <= found["high"] <= 2.07
    assert record.spread["speedup"] == found["high"] - found["low"] < 0.05
    assert found["range"] == 3.0 and found["ratios"] == ratios
    assert with_ratios(*ratios) == record, "the same ratios give the same interval"


def test_interval_covers_the_true_median_about_nineteen_times_in_twenty():
    generator = np.random.default_rng(1)
    drawn = [generator.lognormal(0, 0.3, 15) for _ in range(200)]
    found = [with_ratios(*values.tolist()).details["paired"]["speedup"] for values in drawn]
    assert 0.9 <= sum(one["low"] <= 1.0 <= one["high"] for one in found) / 200 <= 0.99


def test_few_pairs_are_not_made_to_look_certain():
    assert with_ratios(1.0, 2.0, 4.0).spread == {"speedup": 3.0}
    assert with_ratios(1.5).spread == {"speedup": 0.0}


def test_shares_are_of_the_time_between():
    """A type checker at nice 19 takes neither steal time nor a goal's blame."""
    before = {"user": 900.0, "nice": 20.0, "steal": 10.0}
    found = meanwhile(before, {"user": 955.0, "nice": 40.0, "steal": 35.0})
    assert found["steal_share"] == 0.25
    assert found["nice_share"] == 0.2
    assert found["load_1min"] >= 0
    assert meanwhile(before, before)["steal_share"] == 0.0


def test_times_of_this_machine_are_counted_once():
    found = meanwhile(dict.fromkeys(cpu_times(), 0.0))
    assert 0 <= found["steal_share"] <= 1 and 0 <= found["nice_share"] <= 1
    assert sum(cpu_times().values()) > 0
