"""The doctor's findings as one HTML page, to attach to a bug report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.doctor.finding import Finding, counts
from paceline.measure import Result, machine
from paceline.report.render import write_page


def write_doctor_page(findings: Sequence[Finding], result: Result, path: Path) -> None:
    write_page(
        path,
        "doctor.html",
        result=result,
        findings=findings,
        counts=counts(findings),
        machine=machine(),
        figures=[(key, f"{value:.4g}") for row in findings for key, value in row.figures.items()],
        tracebacks=[(row.name, row.traceback) for row in findings if row.traceback],
    )
