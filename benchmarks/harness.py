"""The record of a bench's figures, and runs that are trained by turns."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
import psutil

from paceline.cli.common import CONFIGS
from paceline.config import load_config
from paceline.context import Context
from paceline.measure import Goal, Result, environment
from paceline.report.recorded import RecordedRun, read_run
from paceline.sessions.train import run as run_session

ARENA = CONFIGS / "arena.toml"
_RESAMPLES = 10_000
T = TypeVar("T")


def cpu_times() -> dict[str, float]:
    """Return seconds of the machine's CPUs since boot by use."""
    times = psutil.cpu_times()._asdict()
    return {use: seconds for use, seconds in times.items() if not use.startswith("guest")}  # also in user and nice


def meanwhile(before: Mapping[str, float], now: Mapping[str, float] | None = None) -> dict[str, float]:
    """Return shares of the machine's CPU time since `before`, and the current load.

    `steal` is time that the hypervisor took, `nice` of processes of low priority, which yield to the measurement."""
    spent_s = {use: seconds - before[use] for use, seconds in (now or cpu_times()).items()}
    total_s = sum(spent_s.values()) or 1.0
    shares = {f"{use}_share": spent_s[use] / total_s for use in ("steal", "nice")}
    return {**shares, "load_1min": os.getloadavg()[0]}


@dataclass(slots=True, kw_only=True)
class Record:
    """Figures of a bench with their spread."""

    goals: Mapping[str, Goal] = field(default_factory=dict)
    seeds: Sequence[int] = (0,)
    config: Mapping[str, Any] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    spread: dict[str, float] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, value: float, spread: float = 0.0) -> None:
        self.figures[name], self.spread[name] = float(value), spread

    def mean(self, name: str, values: Sequence[float]) -> None:
        """Add the mean, with the range as its spread."""
        self.add(name, sum(values) / len(values), max(values) - min(values))

    def median(self, name: str, values: Sequence[float]) -> None:
        """Add the median, with the range as its spread."""
        self.add(name, median(values), max(values) - min(values))

    def ratios(self, ratios: Mapping[str, Sequence[float]]) -> None:
        """Add medians of ratios of arms that were measured side by side, with their 95 % bootstrap intervals.

        With five pairs or fewer the interval is the range."""
        for name, values in ratios.items():
            drawn = np.random.default_rng(0).choice(np.asarray(values, np.float64), (_RESAMPLES, len(values)))
            low, high = np.percentile(np.median(drawn, axis=1), (2.5, 97.5)).tolist()
            self.add(name, median(values), high - low)
            pair = {"low": low, "high": high, "range": max(values) - min(values), "ratios": list(values)}
            self.details.setdefault("paired", {})[name] = pair

    def result(self, name: str) -> Result:
        return Result(
            name=name,
            figures=self.figures,
            spread=self.spread,
            goals=self.goals,
            environment=environment(seeds=self.seeds, config=self.config),
            details=self.details,
        )


def train(settings: Sequence[str], context: Context, summarize: Callable[[RecordedRun, Path], T]) -> T:
    """Train the arena's config with these settings in a temporary directory, and summarize the run."""
    with TemporaryDirectory() as scratch:
        own = [f'run.directory="{scratch}"', "run.name=run"]
        directory = run_session(load_config(ARENA, [*settings, *own]), context)
        return summarize(read_run(directory), directory)


def train_by_turns(
    arms: Mapping[str, Sequence[str]],
    seeds: Sequence[int],
    context: Context,
    summarize: Callable[[RecordedRun, Path], T],
) -> dict[str, list[T]]:
    """Train every arm once per seed, in another order for each seed."""
    for settings in arms.values():  # a wrong key must not show in the second hour
        load_config(ARENA, settings)
    found: dict[str, list[T]] = {arm: [] for arm in arms}
    names = list(arms)
    for turn, seed in enumerate(seeds):
        first = turn % len(names)
        for arm in names[first:] + names[:first]:
            found[arm].append(train([*arms[arm], f"run.seed={seed}"], context, summarize))
            context.progress(f"seed {seed}, {arm}: {found[arm][-1]}")
    return found


def by_seed(arms: Mapping[str, Sequence[Any]], seeds: Sequence[int]) -> dict[str, dict[int, dict[str, Any]]]:
    """Return the runs of each arm for `details`."""
    return {arm: {seed: asdict(run) for seed, run in zip(seeds, runs, strict=True)} for arm, runs in arms.items()}


def resolved(file: Path | None, settings: Sequence[str]) -> dict[str, Any]:
    """Return a whole config for the record's environment."""
    return load_config(file, settings).model_dump(mode="json")
