"""The contract of measurements: what a goal means, and what the file holds."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from paceline.measure import Goal, Result, environment


def result(value: float, goal: Goal | None) -> Result:
    return Result(
        name="x", figures={"ratio": value}, spread={"ratio": 0.1}, goals={"ratio": goal} if goal else {}, environment={}
    )


@pytest.mark.parametrize(
    ("value", "goal", "met"),
    [
        (0.8, (">=", 0.8), True),
        (0.79, (">=", 0.8), False),
        (0.8, ("<=", 0.8), True),
        (0.81, ("<=", 0.8), False),
        (math.nan, (">=", 0.8), False),  # what could not be measured does not pass
        (math.nan, ("<=", 0.8), False),
        (0.8, None, None),
    ],
)
def test_goal_is_met_at_its_bound_and_not_beyond(value: float, goal: Goal | None, met: bool | None):
    assert result(value, goal).met("ratio") is met
    assert result(value, goal).all_met is (met is not False)


def test_one_missed_goal_of_several_is_a_miss():
    several = Result(
        name="x",
        figures={"a": 1.0, "b": 1.0, "c": 1.0},
        spread={"a": 0.0, "b": 0.0, "c": 0.0},
        goals={"a": (">=", 0.5), "b": ("<=", 0.5)},
        environment={},
    )
    assert [several.met(name) for name in "abc"] == [True, False, None]
    assert not several.all_met


def test_figure_without_spread_and_goal_without_figure_are_refused():
    with pytest.raises(AssertionError, match="spread"):
        Result(name="x", figures={"a": 1.0}, spread={}, goals={}, environment={})
    with pytest.raises(AssertionError, match="goal"):
        Result(name="x", figures={}, spread={}, goals={"a": (">=", 1.0)}, environment={})


def test_file_holds_the_contract_with_numbers_as_numbers(tmp_path: Path):
    path = tmp_path / "deep" / "x.json"
    figures = {"ratio": np.float32(1.5), "count": np.int64(3)}
    Result(
        name="x",
        figures=figures,
        spread={"ratio": 0.0, "count": 0},
        goals={"ratio": (">=", 1.0)},
        environment={"path": Path("a/b")},
        details={"runs": [1, 2]},
    ).write(path)
    assert json.loads(path.read_text()) == {
        "name": "x",
        "figures": {"ratio": 1.5, "count": 3},
        "spread": {"ratio": 0.0, "count": 0},
        "goals": {"ratio": [">=", 1.0]},
        "environment": {"path": "a/b"},
        "details": {"runs": [1, 2]},
    }
    assert [file.name for file in path.parent.iterdir()] == ["x.json"]


def test_failed_write_keeps_the_older_result(tmp_path: Path):
    path = tmp_path / "x.json"
    result(1.0, None).write(path)
    circle: dict[str, object] = {}
    circle["self"] = circle
    with pytest.raises((ValueError, RecursionError)):
        Result(name="x", figures={}, spread={}, goals={}, environment=circle).write(path)
    assert json.loads(path.read_text())["figures"] == {"ratio": 1.0}


def test_environment_says_what_is_needed_to_measure_again():
    found = environment(seeds=[1, 2], config={"k": 3})
    assert found["seeds"] == [1, 2]
    assert found["config"] == {"k": 3}
    assert found["cores"] >= 1
    assert found["memory_gb"] > 0
    assert {"python", "paceline", "numpy"} <= set(found["versions"])
    json.dumps(found)


def test_result_does_not_name_the_users_home(tmp_path: Path):
    """Results are committed and shown; where somebody keeps his cache is nobody's business."""
    home = Path.home() / "cache"
    Result(name="x", figures={}, spread={}, goals={}, environment={"drafter": str(home)}).write(tmp_path / "x.json")
    assert str(home) not in (tmp_path / "x.json").read_text()
    assert json.loads((tmp_path / "x.json").read_text())["environment"]["drafter"] == "~/cache"
