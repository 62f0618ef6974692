"""A program of another trainer in a process of its own: one JSON object a line in, one out.

    with HostProcess("benchmarks.stock_trl.generation", settings, environ=..., log=...) as host:
        host.read()                     # what it says once it is ready
        host.ask({"prompts": [...]})    # the answer

The program's side is `answers()` and `questions()`. Whatever else it writes, vLLM's log included, goes to the file
`log`, whose end is told if the program fails. It ends when its owner closes it, or has ended.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, Self, TextIO

from paceline.types import PacelineError

Message = Mapping[str, Any]
_END_S = 10.0
"""How long a program may take to end once nobody asks it any more."""
_TOLD = 3000
"""Characters of the log that are told when a program fails."""


class HostProcess:
    """The owner's handle. Every method raises PacelineError once the program has failed or takes too long."""

    def __init__(self, module: str, settings: Message, *, environ: Mapping[str, str], log: Path) -> None:
        self._module, self._log = module, log
        command = [sys.executable, "-P", "-m", module, json.dumps(settings)]
        with log.open("wb") as file:
            self._process = subprocess.Popen(  # noqa: S603  a module of ours
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, env=environ, bufsize=0
            )

    def ask(self, message: Message, *, deadline_s: float = 600.0) -> Any:
        """Send a message and return the answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
        except BrokenPipeError:
            self._fail("has ended")
        return self.read(deadline_s=deadline_s)

    def read(self, *, deadline_s: float = 900.0) -> Any:
        """Return what the program says next."""
        assert self._process.stdout is not None
        in_time, _, _ = select.select([self._process.stdout], [], [], deadline_s)
        if not in_time:
            self._fail(f"has said nothing for {deadline_s:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            self._fail("has ended")
        return json.loads(line)

    def close(self) -> None:
        """End the program: by closing its input, then by force."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fail(self, what: str) -> NoReturn:
        told = self._log.read_text(encoding="utf-8", errors="replace")[-_TOLD:]
        raise PacelineError(f"{self._module} {what}; the end of its log:\n{told}")


def answers() -> Callable[[Message], None]:
    """Return a function that writes an answer to the owner. From now on all other output goes to standard error. Call
    this in the program before anything that could print is imported."""
    pipe: TextIO = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(message: Message) -> None:
        pipe.write(json.dumps(message) + "\n")
        pipe.flush()

    return answer


def questions() -> Iterator[Any]:
    """Yield what the owner asks, until it closes."""
    for line in sys.stdin:
        yield json.loads(line)
