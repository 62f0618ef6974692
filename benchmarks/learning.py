"""By how much does RL on the arena raise held-out accuracy, for several seeds?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from paceline.config import load_config
from paceline.context import Context
from paceline.measure import CpuTimes, Result, environment
from paceline.metrics import read_metrics
from paceline.sessions.train import run as run_session


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Result of one run."""

    curve: tuple[tuple[int, float], ...]
    """Step and held-out accuracy."""
    seconds_per_step: float
    k3: float
    """Median mismatch of a step."""

    @property
    def final(self) -> float:
        return self.curve[-1][1]

    @property
    def gain(self) -> float:
        """Last minus first held-out accuracy, in points."""
        return 100 * (self.curve[-1][1] - self.curve[0][1])


def train_once(config_file: Path, overrides: Sequence[str], seed: int, *, context: Context) -> Training:
    """Train the config with one seed, in a temporary directory."""
    with TemporaryDirectory() as directory:
        settings = [*overrides, f"run.seed={seed}", f'run.directory="{directory}"', f"run.name=seed-{seed}"]
        config = load_config(config_file, settings)
        records = read_metrics(run_session(config, context) / "metrics.jsonl")
    return Training(
        curve=tuple((record["step"], record["metrics"]["eval/accuracy"]) for record in records["eval"]),
        seconds_per_step=records["step"][-1]["time_s"] / len(records["step"]),
        k3=float(np.nanmedian([record["metrics"].get("mismatch/k3", np.nan) for record in records["step"]])),
    )


def run(
    *,
    context: Context,
    config_file: Path,
    seeds: Sequence[int] = (0, 1, 2),
    overrides: Sequence[str] = (),
) -> Result:
    """Train the config once per seed."""
    before = CpuTimes.now()
    trainings: dict[int, Training] = {}
    for seed in seeds:
        training = trainings[seed] = train_once(config_file, overrides, seed, context=context)
        start, end = training.curve[0][1], training.final
        context.progress(f"seed {seed}: held-out accuracy {start:.3f} -> {end:.3f}, gain {training.gain:.1f} points")
    config = load_config(config_file, overrides)
    values = [training.gain for training in trainings.values()]
    figures = {"gain_min": min(values), "gain_mean": sum(values) / len(values), "steps": float(config.run.steps)}
    spread = {"gain_min": max(values) - min(values), "gain_mean": max(values) - min(values), "steps": 0.0}
    return Result(
        name="learning",
        figures=figures,
        spread=spread,
        goals={"gain_min": (">=", 10.0), "steps": ("<=", 40.0)},
        environment=environment(seeds=seeds, config=config.model_dump(mode="json")),
        details={
            "gains": {seed: training.gain for seed, training in trainings.items()},
            "curves": {seed: training.curve for seed, training in trainings.items()},
            "seconds_per_step": {seed: training.seconds_per_step for seed, training in trainings.items()},
            "heldout_samples": config.eval.num_prompts * config.eval.samples_per_prompt,
            "steal_share": CpuTimes.now().steal_share_since(before),
        },
    )
