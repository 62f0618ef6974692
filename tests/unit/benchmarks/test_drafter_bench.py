"""Pairs of steps of the bench `drafter`."""

from __future__ import annotations

from benchmarks.drafter import pairs_of, trains


def test_every_step_with_leases_is_compared_with_its_twin() -> None:
    records = [{"metrics": {"time/step": 7.0 if trains(step) else 6.0}} for step in range(40)]
    found = pairs_of(records)
    assert len(found) == 19 and all((on["time/step"], off["time/step"]) == (7.0, 6.0) for on, off in found)
