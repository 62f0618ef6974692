"""Redirect the output of libraries to a log file.

vLLM, Ray and PyTorch write to standard error in a dozen processes even when a run succeeds. They inherit one
descriptor, which is redirected to a file. The file is named if a command fails, and removed otherwise.
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
"""Least exit code that keeps the file; 1 is the answer "no" of a command that worked."""


def with_own_lines(command: Callable[[TextIO], int], directory: Path) -> int:
    """Run the command with the stream for its own lines, and return its exit code. Nothing is redirected if the caller
    has replaced `sys.stderr`. Otherwise it stays redirected until the process ends, because teardown writes too."""
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
    except Exception:  # noqa: BLE001  a bug of ours that would go unseen
        traceback.print_exc(file=lines)
        code = FAILED
    if code >= FAILED and Path(name).stat().st_size:
        print(f"output of libraries: {name}", file=lines)
    else:
        Path(name).unlink(missing_ok=True)
    return code
