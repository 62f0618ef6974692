"""The doctor's findings as one HTML page, to attach to a bug report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.doctor.check import CheckResult, counts
from paceline.measure import Result, machine
from paceline.report.render import write_page


def write_doctor_page(results: Sequence[CheckResult], result: Result, path: Path) -> None:
    write_page(
        path,
        "doctor.html",
        result=result,
        results=results,
        counts=counts(results),
        machine=machine(),
        figures=[(key, f"{value:.4g}") for row in results for key, value in row.figures.items()],
        tracebacks=[(row.name, row.traceback) for row in results if row.traceback],
    )
