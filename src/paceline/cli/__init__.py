"""The `paceline` command, one file a subcommand. Parses first and imports heavy libraries later, so --help is fast."""

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
from paceline.cli import certify, demo, doctor, draft, explain, export, plan, report, sidecar, train, tune
from paceline.cli.common import cache_root, make_context
from paceline.cli.output import with_own_lines
from paceline.context import CancelledError, Context, RunInterruptedError
from paceline.types import PacelineError

_EPILOG = (
    "start here:\n"
    "  paceline doctor                                  what works on this machine, check by check (about 4 minutes)\n"
    "  paceline demo                                    the promise, kept on this machine (about 5 minutes)\n"
    "  paceline train configs/arena.toml run.steps=10   train as a config says; any setting can be overridden\n"
    "  paceline report runs/arena                       turn a run into one HTML page\n"
    "  paceline plan Qwen/Qwen3-8B --gpus 8xH100 --batch 512 --lengths 4000/32768      what a run would gain, before "
    "it is paid for\n"
)

_FAREWELL_S = 6.0
"""Clusters kill what has not ended some time after SIGTERM, and do not look for its children."""
_COMMANDS = (train, demo, doctor, tune, report, plan, draft, sidecar, export, explain, certify)
"""In the order of --help."""


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(_parser().parse_args(certify.spelled_out(sys.argv[1:] if arguments is None else arguments)))


def run_command(options: argparse.Namespace) -> int:
    """Run the parsed command and return its exit code. Set up the environment, signals and logs for it."""
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
            raise  # not about a file that the user could do something about
        if lines is not sys.stderr:
            traceback.print_exc()  # into the file with what the libraries said
        advice = "check that it exists, that you may use it and that its disk has room"
        print(f"paceline: {error.filename}: {error.strerror}; {advice}", file=lines)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="paceline",
        description="Fast rollouts for RL post-training, on stock vLLM, Ray and PyTorch.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"paceline {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add_to(commands)
    add_verbose(parser)
    return parser


def add_verbose(parser: argparse.ArgumentParser) -> None:
    """Accept --verbose at any position."""
    parser.set_defaults(verbose=False)
    _add_verbose(parser)


def _add_verbose(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--verbose", action="store_true", default=argparse.SUPPRESS, help="show what libraries print")
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                _add_verbose(below)


@contextmanager
def _cancelled_by_sigterm(context: Context) -> Iterator[None]:
    """Let SIGTERM end a command as Ctrl-C does: through its `finally` blocks, so engines are shut down. Whatever a
    command has started, and has not ended by then or within `_FAREWELL_S`, is killed: an engine that compiles, say."""
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
    """Keep our libraries from sending usage reports and from logging; nothing that the user has set is changed.

    The Hugging Face hub stays reachable, because `data.kind = "datasets"` may have to download. Engines, which get
    local paths, are set offline in their own processes."""
    for key, value in {
        "VLLM_NO_USAGE_STATS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_LOGGING_LEVEL": "INFO" if verbose else "ERROR",
    }.items():
        os.environ.setdefault(key, value)
