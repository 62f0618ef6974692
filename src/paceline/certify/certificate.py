"""Write the certificate of `paceline certify` as one HTML page: verdict, tests with their limits, versions, flags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.certify.lossless import DEVIATIONS, KINDS
from paceline.measure import Result
from paceline.report.plots import BLUE, ORANGE, PINK, RED, SOFT, Panel, drawing, new_plot, panel
from paceline.report.render import write_page

_COLORS = dict(zip(KINDS, (BLUE, ORANGE, PINK), strict=True))
_EDGE = 14.0
_MEANING = {
    "sampler_worst_excess": "the engine's sampler on known distributions: worst chi-square, in standard deviations",
    "two_sample_p": "engine with speculation against without: probability of such a difference by chance",
    "surprise_z": "FP32 engine against the learner's exact distribution, in standard deviations",
    "greedy_differences": "greedy FP32 rollouts that differ where the learner sees no tie",
    "logp_max_abs_accepted": "log-probabilities of accepted tokens against the learner's, largest difference (FP32)",
    "logp_max_abs_recovered": "the same for tokens drawn after a rejection",
    "logp_max_abs_bonus": "the same for bonus tokens",
    "tokens": "tokens compared with and without speculation",
    "differences": "tokens that differ by more than rounding",
    "noise_floor": "log-probabilities with speculation against without, largest difference of an equal token",
    "seconds": "duration in seconds",
}


def write_certificate(result: Result, path: Path) -> None:
    """Write the page; all of its content comes from the result."""
    panels = []
    if "sampler_cells" in result.details:
        with drawing():
            panels.append(_sampler(result.details["sampler_cells"]))
    write_page(
        path, "certificate.html", result=result, remarks=_remarks(result.details), meaning=_MEANING, panels=panels
    )


def _remarks(details: Mapping[str, Any]) -> list[str]:
    remarks: list[str] = []
    if details["without_shim"]:
        remarks.append("vLLM's sampler ran without Paceline's shim.")
    if details["fault"] is not None:
        remarks.append(f"Planted fault: {details['fault_about']}.")
    remarks += [f"Missed: {_MEANING[name]}." for name in details["failed"]]
    return remarks + [f"{line[:1].upper()}{line[1:]}." for line in (*details["missing"], *details["notes"])]


def _sampler(cells: Sequence[Mapping[str, Any]]) -> Panel:
    worst = max(cell["excess"] for cell in cells)
    side = "within" if worst <= DEVIATIONS else "outside"
    lengths = sorted({cell["draft_length"] for cell in cells})
    figure, axes = new_plot(2.8)
    for kind, color in _COLORS.items():
        if mine := [cell for cell in cells if cell["drafts"] == kind]:
            nudge = 0.25 * (list(KINDS).index(kind) - 1) - 0.03 * lengths[len(lengths) // 2]
            x = [cell["position"] + 1 + nudge + 0.03 * cell["draft_length"] for cell in mine]
            y = [min(cell["excess"], _EDGE) for cell in mine]
            axes.plot(x, y, "o", color=color, markersize=4, markeredgewidth=0, label=f"{kind} drafts")
    axes.axhline(DEVIATIONS, color=RED, linewidth=1.2)
    axes.text(0.42, DEVIATIONS + 0.3, "limit", color=SOFT)
    axes.set(xlabel="token of the verification step", ylabel="deviations from expected")
    axes.set(xlim=(0.4, max(lengths) + 1.6), ylim=(-7, _EDGE + 1))
    return panel(
        figure,
        f"The sampler is {side} its limit: worst of {len(cells)} chi-squares {worst:.1f}",
        f"Draft lengths {', '.join(map(str, lengths))}; temperatures 0.6 and 1.0 in one batch. Values above "
        f"{_EDGE:.0f} are drawn there.",
    )
