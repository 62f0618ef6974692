"""Endpoint in vLLM's API server for Paceline's calls, for servers that must not expose /collective_rpc.

    vllm serve MODEL --middleware paceline.rollout.endpoint.CallsEndpoint
    POST /paceline/calls {"method": "paceline_push", "args": [push]}         Authorization: Bearer TOKEN

It accepts the calls in calls.py only, with a token (`files.shared_token`) that only processes of the server's user on
the same machine can read.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import JSONResponse

from paceline.files import shared_token
from paceline.rollout.calls import ENDPOINT, NAMES
from paceline.rollout.internals.requests import engine_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send


class CallsEndpoint:
    """ASGI middleware that answers at ENDPOINT and passes on everything else."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].removeprefix(scope.get("root_path", "")) != ENDPOINT:
            await self._app(scope, receive, send)
            return
        status, answer = await _answer(Request(scope, receive))
        await JSONResponse(answer, status)(scope, receive, send)


async def _answer(request: Request) -> tuple[int, dict[str, object]]:
    """Return HTTP status and body."""
    given = request.headers.get("Authorization", "").encode()
    if not secrets.compare_digest(given, f"Bearer {shared_token()}".encode()):
        return 401, {"error": "wrong token; must be the token of the server's user on this machine"}
    try:
        body = await request.json()
        method, args = body["method"], tuple(body.get("args", ()))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return 400, {"error": f'must be {{"method": ..., "args": [...]}}: {error!r}'}
    if method not in NAMES:
        return 400, {"error": f"method: got {method!r}; must be one of {', '.join(NAMES)}"}
    try:
        return 200, {"results": await engine_of(request.app).collective_rpc(method, args=args)}
    except Exception as error:  # noqa: BLE001  returned to the caller
        return 500, {"error": str(error) or repr(error)}
