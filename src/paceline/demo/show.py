"""Live display of the two timelines: animated on a terminal, an occasional line in a log.

plain vLLM  ████████▇▆▅▄▃▃▂▂▂▁▁▁▁▁▁▁▁▁   48/48 rollouts   31.2 s    96 tokens/s
Paceline    ████▇▅▃▂▁▁▁                  48/48 rollouts   14.8 s   203 tokens/s  draft length 5
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.text import Text

from paceline.context import Context
from paceline.demo.batch import DemoTimeline

_BLOCKS = "▁▂▃▄▅▆▇█"
_WIDTH = 44
_EVERY_S = 10.0


@contextmanager
def shown(timelines: Sequence[DemoTimeline], context: Context) -> Iterator[Callable[[], None]]:
    """Yield a function to call after every step."""
    if context.terminal is not None:
        console = Console(file=context.terminal, highlight=False)
        with Live(console=console, get_renderable=lambda: Text("\n".join(lines(timelines))), refresh_per_second=8):
            yield lambda: None
        return
    last_s = time.monotonic()

    def watch() -> None:
        nonlocal last_s
        if time.monotonic() - last_s >= _EVERY_S:
            last_s = time.monotonic()
            context.progress(lines([next(t for t in reversed(timelines) if t.at_s)])[0])

    yield watch
    context.progress(lines(timelines)[-1])


def lines(timelines: Sequence[DemoTimeline]) -> list[str]:
    """Return one line for each timeline that has started."""
    longest_s = max(timeline.seconds for timeline in timelines)
    return [_line(timeline, longest_s) for timeline in timelines if timeline.at_s]


def _line(timeline: DemoTimeline, longest_s: float) -> str:
    at_s = np.linspace(0, longest_s, _WIDTH, endpoint=False)
    shown = at_s[at_s < timeline.seconds]
    running = np.asarray(timeline.running)[np.searchsorted(timeline.at_s, shown)]
    level = np.ceil(running / timeline.num_requests * len(_BLOCKS)).astype(int)
    bar = "".join(_BLOCKS[max(0, min(number, len(_BLOCKS)) - 1)] for number in level)
    done = timeline.num_requests - timeline.running[-1]
    drafts = f"  draft length {timeline.draft_length[-1]}" if any(timeline.draft_length) else ""
    return (
        f"{timeline.name:<11} {bar:<{_WIDTH}} {done:>3}/{timeline.num_requests} rollouts {timeline.seconds:6.1f} s "
        f"{timeline.rates()[-1]:6.0f} tokens/s{drafts}"
    )
