"""An engine of another host, as far as its calls of ours reach: which drafter it has, what it counts, and pushes to it.

    EngineWire ── Rpc ──▶ llm.collective_rpc, or HTTP to vLLM's server ──▶ rollout/calls.py in the workers
         └──────── bytes in /dev/shm (weights/shared_memory.py) ─────────────────┘

Sender and engine must share a machine's shared memory.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from http import HTTPStatus
from http.client import HTTPException
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from paceline.files import shared_token
from paceline.rollout.calls import COUNTERS, DRAFTER, ENDPOINT, NOT_THERE, PUSH, ServedDrafter
from paceline.types import PacelineError
from paceline.weights.deliver import read_reports
from paceline.weights.message import PushReport, Target
from paceline.weights.shared_memory import ShmSender

if TYPE_CHECKING:
    import torch

_COLLECTIVE_RPC = "/collective_rpc"
Rpc = Callable[[str, Sequence[Any]], Sequence[Any]]
"""Calls a method by name with plain arguments; returns one answer of each worker."""


class EngineWire:
    """One engine, or one server with its workers. Every method raises what goes wrong."""

    def __init__(self, rpc: Rpc) -> None:
        self._rpc = rpc
        self._sender: ShmSender | None = None

    def drafter(self) -> ServedDrafter:
        """The drafter that the engine runs; the problem is that of the first worker that has one."""
        found = [ServedDrafter(**answer) for answer in self._call(DRAFTER)]
        return next((drafter for drafter in found if drafter.problem is not None), found[0])

    def counters(self) -> dict[str, float]:
        """Totals of the engine's scheduler since its start, and `draft/version`."""
        (answer,) = self._call(COUNTERS)
        return answer

    def push(self, version: int, weights: Iterable[tuple[str, torch.Tensor]], target: Target) -> None:
        """Send one version of a model, and compare what the workers hold then with what was sent."""
        if self._sender is None:
            self._sender = ShmSender()
        push = self._sender.stage(version, weights, target)
        reports = [PushReport.from_dict(answer) for answer in self._call(PUSH, push.to_dict())]
        error, _, _ = read_reports(push, reports)
        if error is not None:
            raise PacelineError(f"the engine did not take version {version} of the {target}: {error}")

    def close(self) -> None:
        """Free the memory that pushes go through."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def _call(self, method: str, *args: Any) -> Sequence[Any]:
        try:
            return self._rpc(method, args)
        except Exception as error:
            # What vLLM says of a name that nobody has: its executor in one process, and its workers.
            if "is not implemented" in str(error) or f"has no attribute '{method}'" in str(error):
                raise PacelineError(NOT_THERE) from error
            raise


class ServerGoneError(PacelineError):
    """Nobody answers at a server's address: it has not started yet, or has ended."""


def http_rpc(url: str, *, timeout_s: float = 300.0) -> Rpc:
    """Call the engine behind vLLM's server at this address: by /collective_rpc where it is there, else by our own
    endpoint (rollout/endpoint.py), which asks for a token."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"url: got {url!r}; must begin with http:// or https:// because it is a server's address")
    doors = deque([_COLLECTIVE_RPC, ENDPOINT])
    opener = build_opener(ProxyHandler({}))  # the server is on this machine, and a proxy is not

    def post(path: str, body: bytes) -> Sequence[Any]:
        token = {"Authorization": f"Bearer {shared_token()}"} if path == ENDPOINT else {}
        header = {"Content-Type": "application/json"} | token
        request = Request(f"{url.rstrip('/')}{path}", body, header)  # noqa: S310  checked above
        with opener.open(request, timeout=timeout_s) as response:
            return json.load(response)["results"]

    def call(method: str, args: Sequence[Any]) -> Sequence[Any]:
        body = json.dumps({"method": method, "args": list(args)}).encode()
        for _ in range(len(doors)):
            try:
                return post(doors[0], body)
            except HTTPError as error:
                if error.code != HTTPStatus.NOT_FOUND:
                    said = error.read().decode(errors="replace")[:500]
                    raise PacelineError(f"{url} answered {error.code} to {method}: {said or error.reason}") from error
            except (OSError, HTTPException) as error:
                raise ServerGoneError(f"no answer from {url} to {method}: {error}") from error
            except (ValueError, TypeError, KeyError) as error:
                raise PacelineError(f"{url} answered {method} as no server of vLLM does: {error!r}") from error
            doors.rotate()
        raise PacelineError(
            f"{url} has neither {_COLLECTIVE_RPC} nor {ENDPOINT}: start the server with "
            "--middleware paceline.rollout.endpoint.CallsEndpoint"
        )

    return call
