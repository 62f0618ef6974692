"""Pieces of an HTML page with plots: no script, nothing loaded from elsewhere, light and dark.

Plots are inline SVG by matplotlib. Ink, grid and secondary text are drawn in placeholder colours that become CSS
variables, so one picture serves both colour schemes; data colours are Okabe and Ito's, which people with any colour
vision can tell apart.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.files import atomic_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, SOFT, LINE = "#101112", "#131415", "#161718"  # placeholders; see svg
YELLOW, BROWN = "#f0e442", "#8c6d46"
BLUE, ORANGE, GREEN, RED, SKY, PINK, GREY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7", "#8a9099"
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.edgecolor": LINE,
    "axes.labelcolor": SOFT,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "figure.facecolor": "none",
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "text.color": INK,
    "text.parse_math": False,  # an engine's name may hold a dollar sign
    "xtick.color": LINE,
    "xtick.labelcolor": SOFT,
    "ytick.color": LINE,
    "ytick.labelcolor": SOFT,
    "svg.fonttype": "none",  # text stays text: small, searchable, in the reader's font
    "svg.hashsalt": "paceline",  # the same run gives the same page
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One picture, under a title that says what is to be seen in it."""

    title: str
    note: str
    svg: str
    half: bool = False
    """Shares a row with the next half panel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One figure of the head of a page."""

    label: str
    value: str
    note: str = ""


def drawing() -> AbstractContextManager[None]:
    """Inside it, figures are drawn in the style of the page."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise ValueError("report: matplotlib is not installed; pip install 'paceline[report]'") from None
    return mpl.rc_context(_STYLE)


def write_page(
    path: Path,
    *,
    name: str,
    subtitle: Sequence[str],
    state: str = "",
    cards: Sequence[Card],
    panels: Sequence[Panel],
    tables: str,
) -> None:
    """Put a page together and write it in one move: a browser that reloads never sees half of it."""
    text = _TEMPLATE.format(
        name=escape(name),
        subtitle=" · ".join(escape(part) for part in subtitle if part),
        state=f"<p class=notice>{escape(state)}</p>" if state else "",
        cards="".join(_card(card) for card in cards),
        panels="".join(_section(panel) for panel in panels),
        tables=tables,
        css=_CSS,
    )
    with atomic_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def new_figure(height: float, width: float = 9.4) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def step_axis(axes: Axes, first: int, last: int) -> None:
    """RL steps from left to right, in whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlim(first - 0.5, last + 0.5)


def row_inches(num_rows: int) -> float:
    """Height of a row of a timeline, such that many still fit and few are not huge."""
    return max(0.11, min(0.55, 4 / num_rows))


def name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Rows of height 1 from the bottom up, each under its name; of many rows some are named, the top one always."""
    every = 1 if len(names) <= 24 else -(-len(names) // 16)
    shown = list(range(len(names) - 1, -1, -every))
    axes.set_yticks([row + 0.44 for row in shown], [_short(names[row]) for row in shown])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(0, len(names))
    axes.grid(visible=False)


def _short(name: str, most: int = 18) -> str:
    return name if len(name) <= most else f"{name[: most - 8]}…{name[-7:]}"


def svg(figure: Figure, title: str) -> str:
    """The figure as an element of an HTML page: no prolog, no metadata, no fixed size, colours by CSS variable."""
    for axes in figure.axes:
        _plain_powers(axes)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(
        r'^<svg[^>]*?viewBox="([^"]*)"[^>]*>', rf'<svg viewBox="\1" role="img" aria-label="{escape(title)}">', text
    )
    for placeholder, variable in ((INK, "--ink"), (SOFT, "--soft"), (LINE, "--line")):
        text = text.replace(placeholder, f"var({variable})")
    return text


def _plain_powers(axes: Axes) -> None:
    """Labels of a logarithmic axis are mathematics to matplotlib, of which an SVG with real text shows the source."""
    from matplotlib.ticker import LogFormatter, LogFormatterMathtext

    for axis in (axes.xaxis, axes.yaxis):
        if isinstance(axis.get_major_formatter(), LogFormatterMathtext):
            axis.set_major_formatter(lambda value, _: f"{value:g}")
        if isinstance(axis.get_minor_formatter(), LogFormatterMathtext):
            axis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.5)))


def _card(card: Card) -> str:
    label, value, note = escape(card.label), escape(card.value), escape(card.note)
    return f"<div class=card><span>{label}</span><b>{value}</b><small>{note}</small></div>"


def _section(panel: Panel) -> str:
    kind = " class=half" if panel.half else ""
    title, note = escape(panel.title), escape(panel.note)
    return f"<section{kind}><h2>{title}</h2><p>{note}</p><div class=plot>{panel.svg}</div></section>"


def flat(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in tree.items():
        rows += flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(f"{prefix}{key}", str(value))]
    return rows


def table(name: str, rows: Sequence[tuple[str, str]], *, is_open: bool = False) -> str:
    if not rows:
        return ""
    cells = "".join(f"<tr><th>{escape(key)}</th><td>{escape(value)}</td></tr>" for key, value in rows)
    return (
        f"<details{' open' if is_open else ''}><summary>{name} ({len(rows)})</summary><table>{cells}</table></details>"
    )


_CSS = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #59636e; --line: #d5dae0; --paper: #ffffff; --card: #f5f7f9; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8ebee; --soft: #a3adb8; --line: #39414a; --paper: #14171a; --card: #1d2226; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1040px; padding: 2.5rem 1.5rem 4rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
  font-variant-numeric: tabular-nums; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.08rem; line-height: 1.35; margin: 0; }
p { margin: .15rem 0 .6rem; color: var(--soft); font-size: .875rem; }
header p { margin: .3rem 0 0; overflow-wrap: anywhere; }
.notice { border-left: 3px solid #e69f00; padding: .2rem .8rem; margin: 1rem 0 0; }
.cards { display: grid; grid-template-columns: repeat(4, 1fr); gap: .75rem; margin: 1.6rem 0 2.4rem; }
.card { background: var(--card); border-radius: 8px; padding: .8rem 1rem; }
.card span, .card small { display: block; color: var(--soft); font-size: .8rem; line-height: 1.35; }
.card b { display: block; font-size: 1.22rem; font-weight: 600; margin: .1rem 0; }
main { display: grid; grid-template-columns: 1fr 1fr; gap: 2.4rem 2rem; }
section { grid-column: 1 / -1; min-width: 0; }
section.half { grid-column: auto; }
.plot { overflow-x: auto; }
.plot svg { display: block; width: 100%; height: auto; min-width: 640px; }
.half .plot svg { min-width: 340px; }
.plot text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif !important; }
details { border-top: 1px solid var(--line); padding: .7rem 0; }
summary { cursor: pointer; font-weight: 600; }
.tables { margin-top: 2.8rem; }
table { border-collapse: collapse; font-size: .84rem; margin: .6rem 0; }
th, td { text-align: left; vertical-align: top; padding: .18rem 1.2rem .18rem 0; font-weight: 400;
  overflow-wrap: anywhere; }
th { color: var(--soft); white-space: nowrap; }
td { white-space: pre-wrap; }
@media (max-width: 760px) { .cards { grid-template-columns: 1fr 1fr; } section.half { grid-column: 1 / -1; } }
"""

_TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{name}: Paceline report</title>
<style>{css}</style>
</head>
<body>
<header><h1>{name}</h1><p>{subtitle}</p>{state}</header>
<div class="cards">{cards}</div>
<main>{panels}</main>
<div class="tables">{tables}</div>
</body>
</html>
"""
