"""Live progress: what is shown on a terminal, what is left in a log, and that the terminal comes back."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Mapping
from threading import Thread
from typing import Any

import pytest
from rich.console import Console

from paceline.console import ConsoleSink

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
METRICS = {
    "reward/mean": 0.531,
    "rollout/length_mean": 84.2,
    "rollout/length_max": 622,
    "rollout/tokens_per_s": 2310.4,
    "time/step": 12.5,
    "time/generation": 8.0,
    "mismatch/k3": 4.2e-5,
}


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def plain(out: io.StringIO) -> Console:
    return Console(file=out, force_terminal=False, width=60, highlight=False)


def terminal(out: io.StringIO, width: int = 120) -> Console:
    return Console(
        file=out, force_terminal=True, width=width, height=30, color_system=None, highlight=False, legacy_windows=False
    )


def shown(sink: ConsoleSink, width: int = 120) -> str:
    """The live lines as they are now."""
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(sink._render())
    return out.getvalue()


def records() -> list[tuple[str, Mapping[str, Any]]]:
    return [
        ("run", {"config": {"run": {"steps": 40}}, "environment": {}, "started": ""}),
        ("stage", {"step": 0, "stage": "eval", "time_s": 0.0}),
        ("eval", {"step": 0, "time_s": 3.0, "metrics": {"eval/accuracy": 0.512}}),
        ("stage", {"step": 1, "stage": "generation", "time_s": 3.0}),
        ("progress", {"step": 1, "done": 64, "total": 128, "num_tokens": 9000}),
        ("rollouts", {"step": 1}),
        ("step", {"step": 1, "time_s": 15.0, "metrics": METRICS}),
    ]


def test_log_without_a_terminal_is_one_whole_line_per_step_and_evaluation():
    out = io.StringIO()
    sink = ConsoleSink(plain(out))
    for kind, record in records():
        sink.write(kind, record)
    sink.close()
    assert out.getvalue().splitlines() == [
        "held-out accuracy 0.512 after step 0",
        "step  1/40  reward 0.531  length 84 mean, 622 max  2,310 tokens/s  12.5 s, 64 % generation  k3 4.2e-05",
    ]  # not wrapped at 60 columns, no escape codes, no progress


def test_live_lines_say_stage_seconds_progress_and_speed():
    clock = Clock()
    sink = ConsoleSink(terminal(io.StringIO()), clock=clock)
    for kind, record in records()[:5]:
        sink.write(kind, record)
    clock.now_s = 4.5
    text = shown(sink)
    sink.close()
    for part in (
        "step 1/40",
        "generation 4.5 s",
        "64/128 rollouts",
        "9,000 tokens",
        "2,000 tokens/s",
        "held-out 0.512",
    ):
        assert part in text, part


def test_progress_of_the_last_stage_is_gone_in_the_next():
    sink = ConsoleSink(terminal(io.StringIO()), clock=Clock())
    for kind, record in records()[:5]:
        sink.write(kind, record)
    sink.write("stage", {"step": 1, "stage": "train", "time_s": 9.0})
    text = shown(sink)
    sink.close()
    assert "train 0.0 s" in text
    assert "rollouts" not in text


def test_live_lines_fit_a_terminal_of_80_columns():
    sink = ConsoleSink(terminal(io.StringIO(), width=80), clock=Clock())
    for kind, record in [*records(), *records()[3:5]]:
        sink.write(kind, record)
    lines = shown(sink, width=80).splitlines()
    sink.close()
    assert max(len(line) for line in lines) <= 80
    assert len(lines) <= 3


def test_time_left_counts_the_steps_and_not_the_start():
    clock = Clock()
    sink = ConsoleSink(terminal(io.StringIO()), clock=clock)
    for kind, record in records()[:3]:
        sink.write(kind, record)
    clock.now_s = 1000.0  # the evaluation before the first step took that long
    for kind, record in records()[3:5]:
        sink.write(kind, record)
    for step, now_s in ((1, 1010.0), (2, 1020.0)):
        clock.now_s = now_s
        sink.write("step", {"step": step, "time_s": now_s, "metrics": METRICS})
    clock.now_s = 1025.0
    text = shown(sink)
    sink.close()
    assert "6 min left" in text  # 38 steps of 10 s, less the 5 s since: 375 s


def test_first_and_last_held_out_accuracy_are_shown():
    sink = ConsoleSink(terminal(io.StringIO()), clock=Clock())
    for kind, record in records():
        sink.write(kind, record)
    sink.write("eval", {"step": 1, "time_s": 20.0, "metrics": {"eval/accuracy": 0.561}})
    text = shown(sink)
    sink.close()
    assert "held-out 0.512 → 0.561" in text


def test_text_from_outside_is_not_markup():
    out = io.StringIO()
    sink = ConsoleSink(plain(out))
    sink.write(
        "event",
        {"step": 3, "time_s": 14.0, "what": "engine_lost", "engine": "e[1]", "why": "[/red] froze", "redispatched": 3},
    )
    sink.close()
    assert out.getvalue() == "engine lost after 14.0 s: engine e[1], why [/red] froze, redispatched 3\n"


def test_step_with_few_metrics_and_record_of_unknown_kind_are_no_error():
    out = io.StringIO()
    sink = ConsoleSink(plain(out))
    sink.write("step", {"step": 1, "time_s": 1.0, "metrics": {}})
    sink.write("something new", {})
    sink.close()
    assert out.getvalue() == "step 1\n"


def test_close_shows_the_cursor_once_and_gives_stdout_back():
    before = sys.stdout
    out = io.StringIO()
    sink = ConsoleSink(terminal(out))
    assert out.getvalue().count(HIDE_CURSOR) == 1
    sink.close()
    sink.close()
    assert out.getvalue().count(SHOW_CURSOR) == 1
    assert sys.stdout is before


def test_exception_that_nobody_catches_gives_the_terminal_back():
    script = (
        "from rich.console import Console\n"
        "from paceline.console import ConsoleSink\n"
        "sink = ConsoleSink(Console(force_terminal=True))\n"
        "sink.write('stage', {'step': 1, 'stage': 'train', 'time_s': 0.0})\n"
        "raise RuntimeError('boom')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1
    assert HIDE_CURSOR in done.stdout
    assert done.stdout.rindex(SHOW_CURSOR) > done.stdout.rindex(HIDE_CURSOR)


@pytest.mark.parametrize("make", [plain, terminal])
def test_records_from_several_threads_lose_no_line(make):
    out = io.StringIO()
    sink = ConsoleSink(make(out))

    def write(first: int) -> None:
        for step in range(first, first + 50):
            sink.write("step", {"step": step, "time_s": 1.0, "metrics": {}})
            sink.write("progress", {"step": step, "done": 1, "total": 2, "num_tokens": 3})

    threads = [Thread(target=write, args=(first,)) for first in (1000, 2000, 3000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sink.close()
    for first in (1000, 2000, 3000):
        for step in range(first, first + 50):
            assert f"step {step}\n" in out.getvalue()


def test_failures_stand_at_the_end_of_the_step_line():
    out = io.StringIO()
    sink = ConsoleSink(plain(out))
    troubles = {"selector/failures": 3, "engine/preemptions": 1200, "metrics/sink_errors": 0}
    speculation = {"rollout/accepted_length": 2.41, "selector/draft_length_mean": 3.1}
    sink.write("step", {"step": 1, "metrics": METRICS | speculation | troubles})
    (line,) = out.getvalue().splitlines()
    assert "accepted length 2.41  draft length 3.10" in line
    assert line.endswith("3 selector/failures, 1,200 engine/preemptions")
