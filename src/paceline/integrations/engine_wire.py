"""Calls to an engine of another host: its drafter, its counters, and weight pushes.

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
"""Call a method by name with plain arguments and return one answer per worker."""


class EngineWire:
    """One engine, or one server with its workers. Methods raise on errors."""

    def __init__(self, rpc: Rpc) -> None:
        self._rpc = rpc
        self._sender: ShmSender | None = None
        self._policy_version = 0

    def drafter(self) -> ServedDrafter:
        """Return the engine's drafter, with the first problem of any worker."""
        found = [ServedDrafter(**answer) for answer in self._call(DRAFTER)]
        return next((drafter for drafter in found if drafter.problem is not None), found[0])

    def counters(self) -> dict[str, float]:
        """Return the scheduler's totals since its start, and `draft/version`."""
        (answer,) = self._call(COUNTERS)
        return answer

    def push(self, version: int, weights: Iterable[tuple[str, torch.Tensor]], target: Target) -> None:
        """Send one version of a model and verify the workers' fingerprints."""
        if self._sender is None:
            self._sender = ShmSender()
        push = self._sender.stage(version, weights, target)
        reports = [PushReport.from_dict(answer) for answer in self._call(PUSH, push.to_dict())]
        error, _, _ = read_reports(push, reports)
        if error is not None:
            raise PacelineError(f"the engine did not take version {version} of the {target}: {error}")

    def push_policy(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Send the policy as the next version. Errors are raised because a failed sync must end the run."""
        self._policy_version += 1
        self.push(self._policy_version, weights, "policy")

    def close(self) -> None:
        """Free the shared memory."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def _call(self, method: str, *args: Any) -> Sequence[Any]:
        try:
            return self._rpc(method, args)
        except Exception as error:
            # vLLM's errors for an unknown method: of its executor in one process, and of its workers.
            if "is not implemented" in str(error) or f"has no attribute '{method}'" in str(error):
                raise PacelineError(NOT_THERE) from error
            raise


class ServerGoneError(PacelineError):
    """No server answers at the address: it has not started yet, or has ended."""


def http_rpc(url: str, *, timeout_s: float = 300.0) -> Rpc:
    """Return calls to the engine behind vLLM's server: through /collective_rpc if available, otherwise through our
    endpoint (rollout/endpoint.py), which requires a token."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"url: got {url!r}; must begin with http:// or https:// because it is a server's address")
    doors = deque([_COLLECTIVE_RPC, ENDPOINT])
    opener = build_opener(ProxyHandler({}))  # never through a proxy: the server is on this machine

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
                raise PacelineError(f"{url} answered {method} unlike a vLLM server: {error!r}") from error
            doors.rotate()
        raise PacelineError(
            f"{url} has neither {_COLLECTIVE_RPC} nor {ENDPOINT}: start the server with "
            "--middleware paceline.rollout.endpoint.CallsEndpoint"
        )

    return call
