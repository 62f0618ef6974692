"""`paceline bench learning`: does RL on the arena raise held-out accuracy, and by how much, for each of several seeds?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from paceline.config import load_config
from paceline.evidence.measure import CpuTimes, Result, environment
from paceline.metrics import read_metrics
from paceline.session import run as run_session


def run(
    *,
    progress: Callable[[str], None],
    cache_root: Path,
    config_file: Path,
    seeds: Sequence[int] = (0, 1, 2),
    overrides: Sequence[str] = (),
) -> Result:
    """Train the config once per seed; gain is last minus first held-out accuracy, in points."""
    before = CpuTimes.now()
    gains: dict[int, float] = {}
    curves: dict[int, list[tuple[int, float]]] = {}
    step_s: dict[int, float] = {}
    for seed in seeds:
        with TemporaryDirectory() as directory:
            settings = [*overrides, f"run.seed={seed}", f'run.directory="{directory}"', f"run.name=seed-{seed}"]
            config = load_config(config_file, settings)
            records = read_metrics(run_session(config, cache_root=cache_root, progress=progress) / "metrics.jsonl")
        curves[seed] = [(record["step"], record["metrics"]["eval/accuracy"]) for record in records["eval"]]
        gains[seed] = 100 * (curves[seed][-1][1] - curves[seed][0][1])
        step_s[seed] = records["step"][-1]["time_s"] / len(records["step"])
        progress(
            f"seed {seed}: held-out accuracy {curves[seed][0][1]:.3f} -> {curves[seed][-1][1]:.3f}, gain {gains[seed]:.1f} points"
        )
    config = load_config(config_file, overrides)
    values = list(gains.values())
    figures = {"gain_min": min(values), "gain_mean": sum(values) / len(values), "steps": float(config.run.steps)}
    spread = {"gain_min": max(values) - min(values), "gain_mean": max(values) - min(values), "steps": 0.0}
    return Result(
        name="learning",
        figures=figures,
        spread=spread,
        goals={"gain_min": (">=", 10.0), "steps": ("<=", 40.0)},
        environment=environment(seeds=seeds, config=config.model_dump(mode="json")),
        details={
            "gains": gains,
            "curves": curves,
            "seconds_per_step": step_s,
            "heldout_samples": config.eval.num_prompts * config.eval.samples_per_prompt,
            "steal_share": CpuTimes.now().steal_share_since(before),
        },
    )
