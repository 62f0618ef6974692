"""The `paceline` command. Heavy libraries are imported after parsing, to keep --help fast."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TextIO

from paceline import __version__
from paceline.cli import certify, drafter, machine, train
from paceline.cli.common import cache_root, make_context
from paceline.cli.output import with_own_lines
from paceline.cli.parser import Command, build
from paceline.context import CancelledError, Context, RunInterruptedError
from paceline.types import PacelineError

COMMANDS: tuple[Command, ...] = (
    train.TRAIN,
    train.DEMO,
    machine.DOCTOR,
    machine.TUNE,
    train.REPORT,
    train.REPLAY,
    machine.PLAN,
    drafter.DRAFT,
    drafter.SIDECAR,
    drafter.EXPORT,
    drafter.EXPLAIN,
    certify.LOSSLESS,
    certify.LOGP,
)
"""In the order of --help."""
_EPILOG = """
    start here:
      paceline doctor                                  check this machine (about 4 minutes)
      paceline demo                                    run a demo (about 5 minutes)
      paceline train configs/arena.toml run.steps=10   train with a config; override any setting
      paceline report runs/arena                       write a run's report as one HTML page
      paceline plan Qwen/Qwen3-8B --gpus 8xH100 --batch 512 --lengths 4000/32768      predict the gain of a run
    """
_FAREWELL_S = 6.0
"""Clusters kill processes some time after SIGTERM, and ignore their children."""


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(parse(sys.argv[1:] if arguments is None else arguments))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse a command line; `certify ...` is `certify lossless ...`."""
    words = list(arguments)
    actions = [command.words.split()[1] for command in COMMANDS if command.words.startswith("certify ")]
    if words[:1] == ["certify"] and (len(words) == 1 or words[1] not in (*actions, "-h", "--help")):
        words.insert(1, "lossless")
    description = "Fast rollouts for RL post-training, on stock vLLM, Ray and PyTorch."
    parser = build(COMMANDS, prog="paceline", description=description, epilog=_EPILOG)
    parser.add_argument("--version", action="version", version=f"paceline {__version__}")
    return parser.parse_args(words)


def run_command(options: argparse.Namespace) -> int:
    """Run a parsed command with its environment, signals and logs; return its exit code."""
    _set_environment(verbose=options.verbose)
    if options.verbose:
        return _run(options, sys.stderr)
    return with_own_lines(partial(_run, options), cache_root() / "logs")


def _run(options: argparse.Namespace, lines: TextIO) -> int:
    context = make_context(lines)
    try:
        with _cancelled_by_sigterm(context):
            return options.command(options, context)
    except RunInterruptedError as error:
        print(f"paceline: {error}", file=lines)
        return error.exit_code
    except (KeyboardInterrupt, CancelledError):
        print("paceline: interrupted; all processes of the run have ended", file=lines)
        return 128 + (signal.SIGTERM if context.cancelled.is_set() else signal.SIGINT)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("paceline"):
            raise
        brings = "pip install 'paceline[vllm,report]' on GPUs, 'paceline[cpu,report]' on CPUs"
        print(f"paceline: this command needs {error.name}, which is not installed: {brings}", file=lines)
        return 2
    except (ValueError, PacelineError) as error:
        print(f"paceline: {error}", file=lines)
        return 2
    except OSError as error:
        if error.filename is None:
            raise  # no file that the user could check
        if lines is not sys.stderr:
            traceback.print_exc()  # into the log of the libraries
        advice = "check that it exists, that you have access and that its disk has room"
        print(f"paceline: {error.filename}: {error.strerror}; {advice}", file=lines)
        return 2


@contextmanager
def _cancelled_by_sigterm(context: Context) -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C: `finally` blocks shut down engines. Kill child processes that are still running
    afterward or after `_FAREWELL_S`, such as an engine that compiles."""
    import psutil

    strangers = set(psutil.Process().children())

    def end_children() -> None:
        started = [child for child in psutil.Process().children() if child not in strangers]
        for child in started:
            with suppress(psutil.NoSuchProcess):
                for process in (*child.children(recursive=True), child):
                    process.kill()

    timer = threading.Timer(_FAREWELL_S, end_children)
    timer.daemon = True

    def cancel(number: int, frame: object) -> None:
        if not context.cancelled.is_set():
            timer.start()
        context.cancelled.set()
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, cancel)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        timer.cancel()
        if context.cancelled.is_set():
            end_children()


def _set_environment(*, verbose: bool) -> None:
    """Disable usage reports and logs of libraries, unless the user has set these variables. The Hugging Face hub stays
    reachable for `data.kind = "datasets"`; engines get local paths and are offline in their own processes."""
    for key, value in {
        "VLLM_NO_USAGE_STATS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_LOGGING_LEVEL": "INFO" if verbose else "ERROR",
    }.items():
        os.environ.setdefault(key, value)
