"""`paceline doctor`: every check in order, and what came of them as a result in the contract of all measurements."""

from __future__ import annotations

import time
from collections.abc import Sequence

from paceline.config import Config
from paceline.context import Context
from paceline.doctor import engine, inputs, kinds, machine, room, wire
from paceline.doctor.check import CheckResult, counts, plain, run_checks, select
from paceline.doctor.subject import Setup
from paceline.doctor.troubles import TROUBLES, Trouble
from paceline.measure import Goal, Result, environment

CHECKS = (
    *machine.CHECKS,
    *inputs.CHECKS,
    *room.CHECKS,
    *engine.CHECKS,
    *wire.CHECKS,
    *kinds.CHECKS,
)
_FEWEST = 20
"""Checks that have to be run, not skipped, for an examination to count."""


def examine(
    config: Config, context: Context, *, only: Sequence[str] = (), plant: str | None = None
) -> tuple[list[CheckResult], Result]:
    """Run all checks, or those of the names in `only` with what they need. `plant` is one of `troubles.TROUBLES`."""
    trouble: Trouble | None = next((known for known in TROUBLES if known == plant), None)
    if trouble != plant:
        raise ValueError(f"--plant: got {plant!r}; must be one of {', '.join(TROUBLES)}")
    chosen = select(CHECKS, only) if only else list(CHECKS)
    began_s = time.monotonic()
    with Setup(config, context, plant=trouble) as setup:
        results = run_checks(chosen, setup, progress=context.progress)
    return results, _result(results, config, time.monotonic() - began_s, whole=not only, plant=plant)


def _result(
    results: Sequence[CheckResult], config: Config, seconds: float, *, whole: bool, plant: str | None
) -> Result:
    found = counts(results)
    goals: dict[str, Goal] = {"failed": ("<=", 0.0)}
    if whole:
        goals["checks"] = (">=", float(_FEWEST))
    figures = {
        "checks": float(found["passed"] + found["failed"]),
        "failed": float(found["failed"]),
        "skipped": float(found["skipped"]),
        "seconds": seconds,
    }
    return Result(
        name="doctor",
        figures=figures,
        spread=dict.fromkeys(figures, 0.0),
        goals=goals,
        environment=environment(seeds=[config.run.seed], config=config.model_dump(mode="json")),
        details={
            "planted": plant,
            "failed": [result.name for result in results if result.status == "failed"],
            "checks": [plain(result) for result in results],
        },
    )
