"""Pictures of the mismatch from a run that went through every level, and from runs that recorded less."""

import json
from pathlib import Path

import numpy as np

from paceline.learner.correction import HISTOGRAM_EDGES
from paceline.report.mismatch import mismatch_panels, scale_panels
from paceline.report.plots import drawing
from paceline.report.recorded import RecordedRun, read_run


def recorded(
    directory: Path, *, steps: int = 12, histogram: bool = True, guard: bool = True, scales: bool = True
) -> RecordedRun:
    random = np.random.default_rng(0)
    lines = [{"kind": "run", "config": {"guard": {"mode": "act", "correct": 0.002, "mask": 0.01}}, "environment": {}}]
    for step in range(1, steps + 1):
        metrics: dict[str, float] = {"mismatch/k3": 1e-3, "mismatch/floor_k3": 1e-9}
        if guard:
            metrics["guard/level"] = (step - 1) % 6
        if scales:
            metrics |= {f"kv/scale_k/{layer}": 0.01 * (layer + 1) for layer in range(12)}
            metrics |= {f"kv/saturation/{layer}": 0.02 * (layer == 10) for layer in range(12)}
        if histogram:
            counts = np.histogram(random.normal(0, 0.05, 1000).tolist() + [1.5] * 10, HISTOGRAM_EDGES)[0].tolist()
            engines = {"engine-0": 1e-3, "engine-1": 1e-3}
            lines.append(
                {"kind": "mismatch", "step": step, "time_s": step, "counts": counts, "engines": engines, "worst": []}
            )
        lines.append({"kind": "step", "step": step, "time_s": step, "metrics": metrics})
    directory.mkdir(parents=True)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_run(directory)


def test_every_level_and_the_floor_are_in_the_picture(tmp_path: Path) -> None:
    with drawing():
        steps, ratios = mismatch_panels(recorded(tmp_path / "run"))
    assert steps.title == "Mismatch k3 is 1.0e-03 (median), 1,000,000 times the learner's own noise"
    for words in ("observe", "raise precision", "stop", "noise floor", "each engine"):
        assert words in steps.drawing
    assert ratios.title.startswith("1.0 % of tokens"), ratios.title


def test_the_layer_that_saturates_is_named(tmp_path: Path) -> None:
    """Layer 10 comes after layer 2: in the order of text it would be another one."""
    with drawing():
        scale, saturation = scale_panels(recorded(tmp_path / "run"))
    assert "0.12 (k of layer 11)" in scale.title
    assert "2.0 % (layer 10)" in saturation.title


def test_a_run_that_recorded_less_has_fewer_pictures(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", histogram=False, guard=False, scales=False, steps=1)
    with drawing():
        (panel,) = mismatch_panels(run)
        assert scale_panels(run) == []
    assert "guard" not in panel.note
