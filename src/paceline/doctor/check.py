"""What a check is, and how checks run: in order, each by itself, so that the failure of one is never the end of all.

    @check("weights", advice="enlarge /dev/shm", needs=(engine_starts,))
    def push_arrives(setup: Setup) -> CheckOutcome:
        '''A push of the policy arrives with every fingerprint.'''
        return passed("28 tensors") if receipt.ok else failed(receipt.error)

The function's name names the check (`push-arrives`), its docstring is what the table says of it. An exception is a
failure of that check. A check whose `needs` have not passed is skipped, and a skipped check counts for nothing.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from paceline.context import CancelledError

S = TypeVar("S")
Status = Literal["passed", "failed", "skipped"]

_LONGEST_MESSAGE = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOutcome:
    """What a check found."""

    status: Status
    evidence: str
    """What was found, or why nothing was looked for."""
    advice: str = ""
    """What to do about a failure; empty leaves the check's own advice."""
    figures: Mapping[str, float] = field(default_factory=dict)


def passed(evidence: str, **figures: float) -> CheckOutcome:
    return CheckOutcome(status="passed", evidence=evidence, figures=figures)


def failed(evidence: str, advice: str = "") -> CheckOutcome:
    return CheckOutcome(status="failed", evidence=evidence, advice=advice)


def skipped(why: str) -> CheckOutcome:
    return CheckOutcome(status="skipped", evidence=why)


@dataclass(frozen=True, kw_only=True)
class Check(Generic[S]):
    """One thing that must work."""

    name: str
    title: str
    part: str
    """Heading under which it stands."""
    function: Callable[[S], CheckOutcome]
    advice: str
    needs: tuple[Check[S], ...]
    otherwise: str
    """Why those that need it are skipped when it failed."""


def check(
    part: str, *, advice: str, needs: Sequence[Check[S]] = (), otherwise: str = ""
) -> Callable[[Callable[[S], CheckOutcome]], Check[S]]:
    """Make a check of a function; `otherwise` is why the checks that need it are skipped when it failed."""

    def make(function: Callable[[S], CheckOutcome]) -> Check[S]:
        name = function.__name__.replace("_", "-")
        return Check(
            name=name,
            title=" ".join((function.__doc__ or "").split()).rstrip("."),
            part=part,
            function=function,
            advice=advice,
            needs=tuple(needs),
            otherwise=otherwise or f"{name} failed",
        )

    return make


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """A row of the table."""

    name: str
    title: str
    part: str
    status: Status
    evidence: str
    advice: str
    seconds: float
    figures: Mapping[str, float]
    traceback: str


def select(checks: Sequence[Check[S]], names: Iterable[str]) -> list[Check[S]]:
    """Return the checks of these names with all that they need, in their order."""
    by_name = {check.name: check for check in checks}
    wanted: set[str] = set()

    def want(check: Check[S]) -> None:
        wanted.add(check.name)
        for need in check.needs:
            want(need)

    for name in names:
        if name not in by_name:
            near = get_close_matches(name, by_name, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"--only: got {name!r}; must be of {', '.join(by_name)}{hint}")
        want(by_name[name])
    return [check for check in checks if check.name in wanted]


def run_checks(checks: Sequence[Check[S]], setup: S, *, progress: Callable[[str], None]) -> list[CheckResult]:
    """Run checks in their order; `progress` gets a line before each."""
    results: dict[str, CheckResult] = {}
    for number, check in enumerate(checks, start=1):
        progress(f"{number}/{len(checks)} {check.name}: {check.title}")
        results[check.name] = _run(check, setup, results)
    return list(results.values())


def _run(check: Check[S], setup: S, before: Mapping[str, CheckResult]) -> CheckResult:
    trace = ""
    began_s = time.monotonic()
    missing = next((need for need in check.needs if before[need.name].status != "passed"), None)
    if missing is not None:
        broke = before[missing.name].status == "failed"
        outcome = skipped(missing.otherwise if broke else before[missing.name].evidence)
    else:
        try:
            outcome = check.function(setup)
        except CancelledError:
            raise
        except Exception as error:  # noqa: BLE001  whatever it is, it is what the check is there to find
            trace = traceback.format_exc()
            outcome = failed(f"{type(error).__name__}: {error}")
    return CheckResult(
        name=check.name,
        title=check.title,
        part=check.part,
        status=outcome.status,
        evidence=_shown(outcome.evidence, _LONGEST_MESSAGE),
        advice=(outcome.advice or check.advice) if outcome.status == "failed" else "",
        seconds=time.monotonic() - began_s,
        figures=dict(outcome.figures),
        traceback=_shown(trace),
    )


def _shown(text: str, most: int | None = None) -> str:
    """The text as others may see it: the user's home is ~, and a message of vLLM's that fills a page is cut."""
    text = text.replace(str(Path.home()), "~")
    return text if most is None or len(text) <= most else f"{text[:most]}…"


def counts(results: Sequence[CheckResult]) -> dict[Status, int]:
    """How many checks have come out in each way."""
    found: dict[Status, int] = {"passed": 0, "failed": 0, "skipped": 0}
    for result in results:
        found[result.status] += 1
    return found


def table(results: Sequence[CheckResult]) -> str:
    """The results for a terminal, under the headings of their parts, and what to do about each failure."""
    lines: list[str] = []
    width = max(len(result.name) for result in results)
    for index, result in enumerate(results):
        if index == 0 or results[index - 1].part != result.part:
            lines += ["", result.part]
        status = result.status.upper() if result.status == "failed" else result.status
        lines.append(f"  {status:<8} {result.name:<{width}}  {' '.join(result.evidence.split())}")
    broken = [result for result in results if result.status == "failed"]
    if broken:
        lines += ["", "what to do next"]
        lines += [f"  {result.name:<{width}}  {result.advice}" for result in broken]
    return "\n".join(lines[1:])


def plain(result: CheckResult) -> dict[str, Any]:
    """A result for JSON, without what is empty."""
    return {name: value for name, value in asdict(result).items() if value not in ("", {})}
