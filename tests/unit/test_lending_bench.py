"""The arithmetic of the documented run's figures: each must be moved by what it is there to show."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.lending import pairs_of, summarise, trains


def records(*, leased_s: float = 6.0, tokens: float = 5000.0, **draft: float) -> list[dict[str, Any]]:
    """40 steps of 6 s, of which those with leases take `leased_s`; `draft` is what each of them counts."""
    counts = {"num_crashes": 0, "num_leases": 1, "unleased_cpu_s": 0, "stall_s": 0, "idle_s": 0.6, "training_s": 0.4}
    counts |= draft
    return [
        {
            "metrics": {
                "time/step": leased_s if trains(step) else 6.0,
                "fleet/engines": 2,
                "draft/tokens_trained": tokens,
                **{f"draft/{key}": value if trains(step) else 0.0 for key, value in counts.items()},
            }
        }
        for step in range(40)
    ]


def test_every_step_with_leases_is_compared_with_its_twin() -> None:
    found = pairs_of(records(leased_s=7.0))
    assert len(found) == 19 and all((on["time/step"], off["time/step"]) == (7.0, 6.0) for on, off in found)


def test_a_quiet_run_meets_every_goal() -> None:
    result = summarise([records()] * 3, records())
    assert {name: figure for name, (figure, _) in result.figures.items()} == {
        "documented_kills": 0.0,
        "documented_step_ratio": 1.0,
        "documented_tokens_trained": 5000.0,
        "lending_cost": 0.0,
    }
    assert set(result.goals) == set(result.figures)


def test_one_slow_step_is_in_the_ratio_and_in_its_interval() -> None:
    """A trainer that was killed cost 10 s in one step of 40; a median would not see it."""
    run = records()
    run[7]["metrics"]["time/step"] += 10.0
    result = summarise([run, records(), records()], records())
    ratio, width = result.figures["documented_step_ratio"]
    assert ratio == pytest.approx(1 + 10 / (57 * 6)) and width > 0.02
    low, high = result.details["step_ratio_interval"]
    assert low <= 1.0 < ratio < high


def test_what_trainers_do_without_a_lease_and_what_is_waited_for_them_is_the_cost_of_lending() -> None:
    result = summarise([records(unleased_cpu_s=0.06, stall_s=0.03)] * 3, records())
    assert result.figures["lending_cost"][0] == pytest.approx(0.09 / 6.0)


def test_kills_beside_a_busy_process_count() -> None:
    result = summarise([records()] * 3, records(num_crashes=1))
    assert result.figures["documented_kills"][0] == 20


def test_nothing_has_to_be_trained_where_engines_were_hardly_idle() -> None:
    never = summarise([records(idle_s=0.1, tokens=0.0)] * 3, records())
    assert "documented_tokens_trained" not in never.goals
    one = summarise([records(idle_s=0.1, tokens=0.0), records(tokens=0.0), records()], records())
    assert one.figures["documented_tokens_trained"][0] == 0.0 and one.goals["documented_tokens_trained"] == (">=", 1.0)
