"""Process that runs a user's reward function; `reward_pool.py` starts this file as a script.

The protocol is one JSON object per line, through pipes that the function does not see:

    in   {"where": "reward.py", "name": "reward", "path": [...], "memory_bytes": 4294967296}
    out  {"takes_row": true}                       or {"error": "reward.py, line 3: SyntaxError: ..."}
    in   {"prompt": "...", "completion": "...", "row": {...}}
    out  {"reward": 1.0}                           or {"error": "ZeroDivisionError: ...", "broken": false}

Prints of the function go to standard error. A second process watches the pipe from the driver and kills the process
group when the driver ends: the function may hang or have started processes. Only the standard library is imported, for
a fast start.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import math
import os
import resource
import select
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

_MOST_CHARACTERS = 2000
"""Maximum length of an error message."""
Call = Callable[[str, str, Any], Any]
"""Reward function of a prompt, a completion and a row."""
_STANDARD_LIBRARY = str(Path(os.__file__).parent) + os.sep


def main() -> None:
    _start_guard()
    incoming, outgoing = _own_pipes()
    settings = json.loads(incoming.readline())
    _limit_memory(settings["memory_bytes"])
    sys.path[:] = settings["path"]  # the driver's, to import the same modules
    try:
        call, takes_row = load(settings["where"], settings["name"])
    except ValueError as error:
        _write(outgoing, {"error": str(error)})
        return
    _write(outgoing, {"takes_row": takes_row})
    for line in incoming:
        _write(outgoing, _answer(call, json.loads(line)))


def load(where: str, name: str) -> tuple[Call, bool]:
    """Import a function from a file or module; return it as `call(prompt, completion, row)`, and whether it takes the
    row. Raise ValueError if it cannot be used."""
    try:
        module = _import_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except BaseException as error:  # noqa: BLE001  a module may raise anything, SystemExit too
        raise ValueError(f"{where!r} cannot be imported: {_describe(error)}") from None
    function = vars(module).get(name)
    if not callable(function):
        raise ValueError(f"{where!r} has no function {name!r}")
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"{name!r} is asynchronous; must be a plain function because it runs in its own process")
    try:
        signature = inspect.signature(function)
    except ValueError:
        raise ValueError(f"{name!r} has no signature; must be a function written in Python") from None
    in_place, by_name = _row_parameters(signature)
    try:
        signature.bind(*range(2 + in_place), **({"row": None} if by_name else {}))
    except TypeError:
        raise ValueError(
            f"{name!r} takes {len(signature.parameters)} arguments; must be (prompt, completion) or (prompt, "
            "completion, row), and others only with defaults"
        ) from None
    if by_name:
        return (lambda prompt, completion, row: function(prompt, completion, row=row)), True
    if in_place:
        return function, True
    return (lambda prompt, completion, row: function(prompt, completion)), False


def _row_parameters(signature: inspect.Signature) -> tuple[bool, bool]:
    """Return whether the row is the third argument, and whether it is passed by name. A parameter named `row` takes it,
    and so does a third one without a default. `scale=2.0` keeps its default."""
    kind = inspect.Parameter
    parameters = list(signature.parameters.values())
    third = next((p for p in parameters[2:3] if p.kind in (kind.POSITIONAL_ONLY, kind.POSITIONAL_OR_KEYWORD)), None)
    by_name = any(p.name == "row" and p.kind in (kind.POSITIONAL_OR_KEYWORD, kind.KEYWORD_ONLY) for p in parameters[2:])
    in_place = not by_name and third is not None and (third.name == "row" or third.default is kind.empty)
    return in_place, by_name


def _start_guard() -> None:
    """Start the process that kills the group. It is not a child of this one, because the function may wait for all."""
    if middle := os.fork():
        os.waitpid(middle, 0)
        return
    if os.fork():
        os._exit(0)
    os.closerange(1, 64)  # otherwise the driver would not see the worker's pipe close
    driver = select.poll()
    driver.register(0, 0)  # reports only that it closed
    driver.poll()
    os.killpg(0, signal.SIGKILL)


def _own_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Move the protocol's pipes away from stdin and stdout, which the function and its children use."""
    incoming, outgoing = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return incoming, outgoing


def _limit_memory(num_bytes: int) -> None:
    """Limit writable memory. Address space is not a useful limit: libraries reserve far more than they use."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _answer(call: Call, request: dict[str, Any]) -> dict[str, Any]:
    try:
        reward = float(call(request["prompt"], request["completion"], request.get("row")))
    except MemoryError:
        return {"error": "MemoryError: it needs more than data.reward_memory_gb", "broken": True}
    except Exception as error:  # noqa: BLE001  whatever the function raises is an answer
        return {"error": _describe(error), "broken": False}
    except BaseException as error:  # noqa: BLE001  SystemExit: the function ends its process
        return {"error": _describe(error), "broken": True}
    if not math.isfinite(reward):
        return {"error": f"it returned {reward}; must be a finite number", "broken": False}
    return {"reward": reward}


def _describe(error: BaseException) -> str:
    """Return type and text of an error, with the innermost line of the user's code."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}: {type(error).__name__}: {error.msg}"
    text = "".join(traceback.format_exception_only(error)).strip()[:_MOST_CHARACTERS]
    foreign = ("<", __file__, _STANDARD_LIBRARY)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(foreign)]
    return f"{frames[-1].filename}, line {frames[-1].lineno}: {text}" if frames else text


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    name = f"paceline_task_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module


def _write(outgoing: BinaryIO, answer: dict[str, Any]) -> None:
    outgoing.write(json.dumps(answer).encode() + b"\n")
    outgoing.flush()


if __name__ == "__main__":
    main()
