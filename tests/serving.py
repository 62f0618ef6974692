"""A server in a process of its own, for tests that talk to it as users do."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

API_SERVER = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]
"""What `vllm serve` starts. The command itself does not come up from the CPU rebuild, whose package has another name
than the one that it asks its version of."""
TRL_FLAGS = (
    "--max-model-len",
    "512",
    "--max-num-seqs",
    "64",
    "--logprobs-mode",
    "processed_logprobs",
    "--max-logprobs",
    "-1",
)
"""What a server needs for TRL, with the sizes of examples/trl."""


@contextmanager
def served(command: Sequence[str | Path], *, env: Mapping[str, str], log: Path) -> Iterator[str]:
    """Start `command` with an address of its own, and yield the URL once it answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with log.open("w") as output:
        server = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)], env=dict(env), stdout=output, stderr=output
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_for(f"{url}/health", server, log)
        yield url
    finally:
        server.terminate()
        server.wait(120)


def complete(url: str, **body: object) -> dict[str, Any]:
    """Return the server's answer to a request for a completion."""
    data, header = json.dumps(body).encode(), {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", data, header), timeout=300) as answer:
        return json.load(answer)


def metrics(url: str) -> dict[str, float]:
    """Return what the server's /metrics shows, by name; of one that has several labels the last."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as page:
        lines = [line for line in page.read().decode().splitlines() if line and not line.startswith("#")]
    return {line.split("{")[0].split(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def _wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()[-3000:]
        try:
            urllib.request.urlopen(url, timeout=2).close()
            return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
    raise AssertionError(f"no answer from {url}\n{log.read_text()[-3000:]}")
