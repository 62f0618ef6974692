"""Results of checks, and how they are shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Status = Literal["passed", "failed", "skipped"]


class SkippedError(Exception):
    """A check cannot run here; the message is the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    status: Status
    evidence: str
    """Observation, or why the check did not run."""
    advice: str = ""
    """What to do about a failure. Empty: the check's own advice applies."""
    figures: Mapping[str, float] = field(default_factory=dict)
    name: str = ""
    """Name, title and everything below are filled in by `run_checks`."""
    title: str = ""
    part: str = ""
    seconds: float = 0.0
    traceback: str = ""


def passed(evidence: str, **figures: float) -> Finding:
    return Finding(status="passed", evidence=evidence, figures=figures)


def failed(evidence: str, advice: str = "") -> Finding:
    return Finding(status="failed", evidence=evidence, advice=advice)


def counts(findings: Sequence[Finding]) -> dict[Status, int]:
    found = [finding.status for finding in findings]
    return {status: found.count(status) for status in ("passed", "failed", "skipped")}


def table(findings: Sequence[Finding]) -> str:
    """Format findings for a terminal, grouped by part, with advice for each failure at the end."""
    lines: list[str] = []
    width = max(len(finding.name) for finding in findings)
    for index, finding in enumerate(findings):
        if index == 0 or findings[index - 1].part != finding.part:
            lines += ["", finding.part]
        status = finding.status.upper() if finding.status == "failed" else finding.status
        lines.append(f"  {status:<8} {finding.name:<{width}}  {' '.join(finding.evidence.split())}")
    broken = [finding for finding in findings if finding.status == "failed"]
    if broken:
        lines += ["", "what to do next"]
        lines += [f"  {finding.name:<{width}}  {finding.advice}" for finding in broken]
    return "\n".join(lines[1:])
