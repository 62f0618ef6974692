"""Whose lines reach the terminal: Paceline's own.

A run has a dozen processes of vLLM, Ray and PyTorch, and most write to standard error in a run that goes well: progress
bars, warnings about the machine, deprecations of each other. The descriptor that all of them inherit is redirected to a
file, whatever language writes to it. The file is named when a command fails, and removed otherwise.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from paceline.files import private_directory

FAILED = 2
"""Exit code from which on the file is kept; 1 is the answer "no" of a command that worked."""


def with_own_lines(command: Callable[[TextIO], int], directory: Path) -> int:
    """Run the command with the stream for its own lines, and return its exit code.

    Nothing is redirected for a caller who has replaced `sys.stderr`. Otherwise it stays redirected until the process
    ends, since what is torn down after the command writes too."""
    if sys.stderr is not sys.__stderr__:
        return command(sys.stderr)
    lines = os.fdopen(os.dup(sys.stderr.fileno()), "w", buffering=1, errors="backslashreplace")
    try:
        handle, name = tempfile.mkstemp(suffix=".log", dir=private_directory(directory))
    except OSError as error:
        print(f"paceline: {directory}: {error.strerror}; set PACELINE_CACHE to a directory with room", file=lines)
        return FAILED
    os.dup2(handle, sys.stderr.fileno())
    os.close(handle)
    try:
        code = command(lines)
    except Exception:  # noqa: BLE001  a bug of ours, which nobody would see otherwise
        traceback.print_exc(file=lines)
        code = FAILED
    if code >= FAILED and Path(name).stat().st_size:
        print(f"what the libraries said: {name}", file=lines)
    else:
        Path(name).unlink(missing_ok=True)
    return code
