"""Programs with stock TRL in processes of their own, with one JSON object per line in and out.

    with HostProcess("benchmarks.stock_trl.generation", settings, environ=..., log=...) as host:
        host.read()                     # its first message
        host.ask({"prompts": [...]})    # an answer

The program uses `answers()` and `questions()`. Its other output goes to the file `log`, and the end of the log into the
error if it fails. The program ends with its owner.

TRL is installed into a cache directory without its dependencies, so both arms of a comparison have the same vLLM,
PyTorch and transformers.
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

from paceline.arena.policy import build_once
from paceline.context import Context
from paceline.files import atomic_directory, sha256, write_checksums
from paceline.types import PacelineError

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "requirements" / "trl.txt"
"""Version and checksum of TRL."""
Message = Mapping[str, Any]
_END_S = 10.0
"""Time to end after the last question."""
_LOG_END = 3000
"""Characters of the log in an error."""


def trl_site(context: Context, requirements: Path = REQUIREMENTS) -> Path:
    """Return the directory that holds TRL; downloads it first if it is absent or damaged."""
    directory = context.cache_root / "hosts" / f"trl-{sha256(requirements)[:12]}"

    def write(directory: Path) -> None:
        context.progress(f"installing TRL into {directory}")
        with atomic_directory(directory) as partial:
            _install(requirements, partial)
            write_checksums(partial)

    return build_once(directory, write, name="TRL", context=context)


def _install(requirements: Path, target: Path) -> None:
    options = ("--quiet", "--no-deps", "--require-hashes", "--only-binary=:all:", "--no-compile")
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(target), "-r", str(requirements)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  a file of ours
    if done.returncode:
        raise PacelineError(f"TRL cannot be installed: {done.stderr.strip()[-1000:]}\nIt was tried with: {command}")


def host_environment(
    environ: Mapping[str, str], site: Path, *, kv_cache_gb: int, speculation: Path | None = None
) -> dict[str, str]:
    """Return the variables of a process with TRL and one engine, which speculates if there is a `speculation` file.

    On CPUs, vLLM would take a share of all memory and bind its threads to cores."""
    kept = {name: value for name, value in environ.items() if name != "PACELINE"}
    path = os.pathsep.join([str(site), str(ROOT), *filter(None, [environ.get("PYTHONPATH")])])
    own = {
        "PYTHONPATH": path,
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gb),
        "VLLM_USE_AOT_COMPILE": "0",  # as our engines: CPUs cannot load such code
    }
    return kept | own | ({} if speculation is None else {"PACELINE": str(speculation)})


class HostProcess:
    """The owner's handle. Methods raise PacelineError if the program fails or takes too long."""

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
        """Return the program's next message."""
        assert self._process.stdout is not None
        in_time, _, _ = select.select([self._process.stdout], [], [], deadline_s)
        if not in_time:
            self._fail(f"has said nothing for {deadline_s:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            self._fail("has ended")
        return json.loads(line)

    def close(self) -> None:
        """End the program by closing its input, then by force."""
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
        end = self._log.read_text(encoding="utf-8", errors="replace")[-_LOG_END:]
        raise PacelineError(f"{self._module} {what}; the end of its log:\n{end}")


def answers() -> Callable[[Message], None]:
    """Return a function that writes an answer to the owner, and redirect all other output to standard error. Call it
    before imports that could print."""
    pipe: TextIO = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(message: Message) -> None:
        pipe.write(json.dumps(message) + "\n")
        pipe.flush()

    return answer


def questions() -> Iterator[Any]:
    """Yield the owner's questions until it closes."""
    for line in sys.stdin:
        yield json.loads(line)
