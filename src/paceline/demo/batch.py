"""The batch of the demo's two engines, and a live display of its timelines: animated on a terminal, lines in a log.

plain vLLM  ████████▇▆▅▄▃▃▂▂▂▁▁▁▁▁▁▁▁▁   48/48 rollouts   31.2 s    96 tokens/s
Paceline    ████▇▅▃▂▁▁▁                  48/48 rollouts   14.8 s   203 tokens/s  draft length 5
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.live import Live
from rich.text import Text
from transformers import AutoTokenizer

from paceline.arena.task import problems, solution
from paceline.config import SelectorConfig
from paceline.context import Context
from paceline.rollout.stepped import Order, SteppedBatch, SteppedEngine
from paceline.types import GroupId, RolloutRequest

_OF_SOLUTION = 0.8
"""Length of a request as a share of a solution's length, so that few requests continue beyond their end."""

_BLOCKS = "▁▂▃▄▅▆▇█"
_WIDTH = 44
_EVERY_S = 10.0


@dataclass(slots=True, kw_only=True)
class DemoTimeline:
    """Progress of one engine, in seconds since its start."""

    name: str
    num_requests: int
    at_s: list[float] = field(default_factory=list)
    """End of each step."""
    running: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    """Total tokens after each step."""
    draft_length: list[int] = field(default_factory=list)

    def add(self, seconds: float, num_running: int, num_tokens: int, draft_length: int) -> None:
        self.at_s.append(seconds)
        self.running.append(num_running)
        self.num_tokens.append(num_tokens)
        self.draft_length.append(draft_length)

    @property
    def seconds(self) -> float:
        return self.at_s[-1] if self.at_s else 0.0

    def rates(self, window_s: float = 2.0) -> npt.NDArray[np.float64]:
        """Return the tokens per second over a moving window, at the end of every step."""
        at_s, tokens = np.array([0.0, *self.at_s]), np.array([0, *self.num_tokens])
        first = np.searchsorted(at_s, at_s[1:] - window_s)
        return (tokens[1:] - tokens[first]) / np.maximum(at_s[1:] - at_s[first], 1e-9)


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


def long_tailed_batch(model_path: Path, *, num_requests: int, longest: int, seed: int) -> list[RolloutRequest]:
    """Return seeded requests of arena prompts, with fixed response lengths taken from solutions."""
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    rng = random.Random(seed)  # noqa: S311  a workload, not a secret
    requests = []
    for number, problem in enumerate(islice(problems(seed), num_requests)):
        length = len(tokenizer.encode(solution(problem, rng)))
        requests.append(
            RolloutRequest(
                group_id=GroupId(number),
                index=0,
                prompt_ids=np.asarray(tokenizer.encode(problem.prompt), np.int32),
                max_tokens=max(1, min(longest, int(_OF_SOLUTION * length))),
                temperature=1.0,
                seed=number,
            )
        )
    return requests


def play(
    engine: SteppedEngine,
    requests: list[RolloutRequest],
    timeline: DemoTimeline,
    *,
    selector: SelectorConfig | None,
    watch: Callable[[], None],
) -> SteppedBatch:
    """Generate the batch, and call `watch` after adding each step to `timeline`."""
    engine.begin(Order(requests=requests, selector=selector, name="demo", to_the_end=True))
    while not isinstance(answer := engine.turn(), SteppedBatch):
        if answer.seconds:
            timeline.add(answer.seconds, answer.num_running, answer.num_tokens, answer.draft_length)
        watch()
    timeline.add(answer.seconds, 0, sum(map(len, answer.token_ids)), timeline.draft_length[-1])
    return answer
