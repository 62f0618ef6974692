"""Show live progress of a run on the console, from the same records as metrics.jsonl.

On a terminal two lines at the bottom show the current state, and every finished step leaves a line above them:

    step  3/40  reward 0.531  length 84 mean, 622 max  2,310 tokens/s  12.3 s, 64 % generation  k3 4.2e-05
    ⠙ step 4/40  generation 5.2 s  ━━━━━━━━╺━━━  96/128 rollouts  9,214 tokens  1,772 tokens/s
      reward 0.531  length 84 mean, 622 max  2,310 tokens/s  held-out 0.512 → 0.561  7 min left

Without a terminal (a log, a CI job) only the lines of steps, evaluations and events are printed. rich draws in its own
thread, so the state is one frozen record that is replaced as a whole.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from paceline.context import time_left
from paceline.metrics import PER_STEP, SINCE_START


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    total_steps: int | None = None
    step: int = 0
    stage: str = "start"
    stage_since: float
    """On the clock of the sink, as all times here."""
    rollouts: tuple[int, int] | None = None
    """Done and total of the current batch."""
    num_tokens: int = 0
    first_step_since: float | None = None
    num_steps_done: int = 0
    last_step_at: float = 0.0
    last: str = ""
    """Reward, lengths and speed of the last finished step."""
    first_accuracy: float | None = None
    accuracy: float | None = None


class ConsoleSink:
    """Print the records of one run; restore the terminal at `close()` or at process exit."""

    def __init__(self, console: Console | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console or Console(highlight=False)
        self._clock = clock
        self._lock = Lock()
        self._state = _State(stage_since=clock())
        self._spinner = Spinner("dots")
        self._live: Live | None = None
        if self._console.is_terminal:
            # The drawing thread renders four times per second, so times advance while the event loop is busy.
            self._live = Live(console=self._console, get_renderable=self._render, refresh_per_second=4, transient=True)
            self._live.start()
            atexit.register(self.close)  # an uncaught exception must not leave the cursor hidden

    def write(self, kind: str, record: Mapping[str, Any]) -> None:
        with self._lock:
            self._state, line = _after(self._state, kind, record, self._clock())
        if line is not None:
            # Text, not markup: names may contain brackets. soft_wrap keeps one line at any width of a log.
            self._console.print(line, soft_wrap=True)

    def close(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()
            atexit.unregister(self.close)

    def _render(self) -> RenderableType:
        state, now = self._state, self._clock()
        head = Table.grid(padding=(0, 2, 0, 0))
        cells: list[RenderableType] = [self._spinner, Text(_position(state), style="bold")]
        cells.append(Text(f"{state.stage} {now - state.stage_since:.1f} s", style="cyan"))
        if state.rollouts is not None:
            done, total = state.rollouts
            if self._console.width >= 100:
                cells.append(ProgressBar(total=total, completed=done, width=20))
            rate = state.num_tokens / max(now - state.stage_since, 1e-3)
            text = f"{done:,}/{total:,} rollouts  {state.num_tokens:,} tokens  {rate:,.0f} tokens/s"
            cells.append(Text(text, no_wrap=True, overflow="ellipsis"))
        head.add_row(*cells)
        return Group(head, Text("  " + "  ".join(filter(None, [state.last, _held_out(state), _time_left(state, now)]))))


def _after(state: _State, kind: str, record: Mapping[str, Any], now: float) -> tuple[_State, Text | None]:
    """Return the state after a record, and the line to print for it."""
    line: Text | None = None
    match kind:
        case "run":
            state = replace(state, total_steps=record["config"]["run"]["steps"])
        case "stage":
            since = state.first_step_since
            if since is None and record["step"] > 0:
                since = now  # excludes the evaluation before the first step
            state = replace(state, step=record["step"], stage=record["stage"], stage_since=now, first_step_since=since)
            state = replace(state, rollouts=None, num_tokens=0)
        case "progress":
            state = replace(state, rollouts=(record["done"], record["total"]), num_tokens=record["num_tokens"])
        case "step":
            state = replace(
                state, num_steps_done=state.num_steps_done + 1, last_step_at=now, last=_outcome(record["metrics"])
            )
            line = _step_line(replace(state, step=record["step"]), record["metrics"])
        case "eval":
            accuracy = record["metrics"]["eval/accuracy"]
            first = accuracy if state.first_accuracy is None else state.first_accuracy
            state = replace(state, first_accuracy=first, accuracy=accuracy)
            line = Text(f"held-out accuracy {accuracy:.3f} after step {record['step']}", style="green")
        case "event":
            rest = ", ".join(f"{key} {value}" for key, value in record.items() if key not in ("what", "time_s", "step"))
            line = Text(f"{record['what'].replace('_', ' ')} after {record['time_s']:.1f} s: {rest}", style="yellow")
    return state, line


def _position(state: _State) -> str:
    if state.step == 0:
        return "before step 1"
    return f"step {state.step}" + (f"/{state.total_steps}" if state.total_steps else "")


def _outcome(metrics: Mapping[str, float]) -> str:
    parts = []
    if "reward/mean" in metrics:
        parts.append(f"reward {metrics['reward/mean']:.3f}")
    if "rollout/length_mean" in metrics and "rollout/length_max" in metrics:
        parts.append(f"length {metrics['rollout/length_mean']:.0f} mean, {metrics['rollout/length_max']:.0f} max")
    if "rollout/tokens_per_s" in metrics:
        parts.append(f"{metrics['rollout/tokens_per_s']:,.0f} tokens/s")
    if "rollout/accepted_length" in metrics:
        parts.append(f"accepted length {metrics['rollout/accepted_length']:.2f}")
    if "selector/draft_length_mean" in metrics:
        parts.append(f"draft length {metrics['selector/draft_length_mean']:.2f}")
    return "  ".join(parts)


def _step_line(state: _State, metrics: Mapping[str, float]) -> Text:
    width = len(str(state.total_steps or ""))
    total = f"/{state.total_steps}" if state.total_steps else ""
    parts = [f"step {state.step:>{width}}{total}", state.last]
    if "time/step" in metrics:
        share = metrics.get("time/generation", 0.0) / metrics["time/step"] if metrics["time/step"] else 0.0
        parts.append(f"{metrics['time/step']:.1f} s, {share:.0%} generation".replace("%", " %"))
    if "mismatch/k3" in metrics:
        parts.append(f"k3 {metrics['mismatch/k3']:.1e}")
    line = Text("  ".join(filter(None, parts)))
    failures = ", ".join(f"{metrics[key]:,.0f} {key}" for key in (*PER_STEP, *SINCE_START) if metrics.get(key, 0) > 0)
    return line.append(f"  {failures}", style="yellow") if failures else line


def _held_out(state: _State) -> str:
    if state.accuracy is None or state.first_accuracy is None:
        return ""
    if state.num_steps_done == 0:
        return f"held-out {state.accuracy:.3f}"
    return f"held-out {state.first_accuracy:.3f} → {state.accuracy:.3f}"


def _time_left(state: _State, now: float) -> str:
    """Format the remaining time at the average pace so far, evaluations included."""
    if state.total_steps is None or state.first_step_since is None or state.num_steps_done == 0:
        return ""
    pace = (state.last_step_at - state.first_step_since) / state.num_steps_done
    return time_left(pace * (state.total_steps - state.num_steps_done) - (now - state.last_step_at))
