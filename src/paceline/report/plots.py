"""Draw plots as inline SVG in one style, for light and dark pages.

Ink, grid and secondary text are drawn in placeholder colors that become CSS variables. The data colors are Okabe and
Ito's, which are distinct with any color vision.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, SOFT, LINE = "#101112", "#131415", "#161718"  # placeholders; see `panel`
YELLOW, BROWN = "#f0e442", "#8c6d46"
BLUE, ORANGE, GREEN, RED, SKY, PINK, GRAY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7", "#8a9099"
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
    "text.parse_math": False,  # a dollar sign in an engine's name is no formula
    "xtick.color": LINE,
    "xtick.labelcolor": SOFT,
    "ytick.color": LINE,
    "ytick.labelcolor": SOFT,
    "svg.fonttype": "none",  # text stays text: small, searchable, in the reader's font
    "svg.hashsalt": "paceline",  # the same run gives the same page
}
_WIDTH, _HALF_WIDTH = 9.4, 4.6


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A plot under a title that states its finding."""

    title: str
    note: str
    view_box: str
    drawing: str
    """SVG after the opening tag. matplotlib has escaped its text."""
    half: bool
    """Share a row with the next half panel."""


def drawing() -> AbstractContextManager[None]:
    try:
        import matplotlib as mpl
    except ImportError:
        raise ValueError("report: matplotlib is not installed; pip install 'paceline[report]'") from None
    return mpl.rc_context(_STYLE)


def new_figure(height: float, *, half: bool = False) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(_HALF_WIDTH if half else _WIDTH, height), layout="constrained")


def new_plot(height: float, *, half: bool = False) -> tuple[Figure, Axes]:
    figure = new_figure(height, half=half)
    return figure, figure.add_subplot()


def panel(figure: Figure, title: str, note: str = "", *, columns: int = 4) -> Panel:
    """Return the figure as SVG without prolog, metadata and fixed size, with one legend for all axes."""
    if any(axes.get_legend_handles_labels()[1] for axes in figure.axes):
        figure.legend(loc="outside upper left", ncols=columns, handlelength=1.4)
    for axes in figure.axes:
        _plain_powers(axes)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = re.sub(r"<metadata>.*?</metadata>", "", buffer.getvalue(), flags=re.DOTALL)
    for placeholder, variable in ((INK, "--ink"), (SOFT, "--soft"), (LINE, "--line")):
        text = text.replace(placeholder, f"var({variable})")
    tag = re.search(r'<svg[^>]*?viewBox="([^"]*)"[^>]*>', text)
    assert tag is not None
    half = figure.get_figwidth() < _WIDTH
    return Panel(title=title, note=note, view_box=tag[1], drawing=text[tag.end() :], half=half)


def step_axis(axes: Axes, first: int, last: int) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set(xlabel="step", xlim=(first - 0.5, last + 0.5))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def count_axis(axes: Axes, counts: Sequence[int]) -> None:
    """Make the x axis logarithmic, with one label per count."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts], fontsize=7)


def bar_rows(axes: Axes, names: Sequence[str]) -> None:
    """Name horizontal bars, the first on top."""
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(visible=False)


def shades(count: int) -> list[Any]:
    from matplotlib import colormaps

    return [colormaps["viridis"](0.15 + 0.7 * number / max(1, count - 1)) for number in range(count)]


def row_inches(num_rows: int) -> float:
    """Return the height of a timeline's row: many rows fit, few are not huge."""
    return max(0.11, min(0.55, 4 / num_rows))


def name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Name rows of height 1 from the bottom up; of many rows, name some and always the top one."""
    every = 1 if len(names) <= 24 else -(-len(names) // 16)
    shown = list(range(len(names) - 1, -1, -every))
    axes.set_yticks([row + 0.44 for row in shown], [_short(names[row]) for row in shown])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(0, len(names))
    axes.grid(visible=False)


def _short(name: str, most: int = 18) -> str:
    return name if len(name) <= most else f"{name[: most - 8]}…{name[-7:]}"


def _plain_powers(axes: Axes) -> None:
    """Format logarithmic ticks as plain text; matplotlib's formulas would show as their source."""
    from matplotlib.ticker import LogFormatter, LogFormatterMathtext

    for axis in (axes.xaxis, axes.yaxis):
        if isinstance(axis.get_major_formatter(), LogFormatterMathtext):
            axis.set_major_formatter(lambda value, _: f"{value:g}")
        if isinstance(axis.get_minor_formatter(), LogFormatterMathtext):
            axis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.5)))
