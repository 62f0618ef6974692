"""Our endpoint in vLLM's API server: nobody without the token gets through, and nothing but calls of ours."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.files import shared_token
from paceline.rollout.calls import COUNTERS, ENDPOINT

pytest.importorskip("starlette", reason="comes with vLLM")

from paceline.rollout.endpoint import CallsEndpoint


class Engine:
    """An engine as vLLM's server has it."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        if args == ("fail",):
            raise RuntimeError("the worker is on fire")
        self.calls.append((method, args))
        return [{"draft/version": 3.0}]


async def passed_on(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 299, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})


def ask(body: object, *, token: str | None, path: str = ENDPOINT, root: str = "") -> tuple[int, Any, Engine]:
    """Status, answer, and the engine that was asked."""
    engine, sent = Engine(), list[dict[str, Any]]()
    header = [] if token is None else [(b"authorization", f"Bearer {token}".encode())]
    app = SimpleNamespace(state=SimpleNamespace(engine_client=engine))
    scope = {"type": "http", "method": "POST", "path": root + path, "root_path": root, "headers": header, "app": app}

    async def receive() -> dict[str, Any]:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return {"type": "http.request", "body": content, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(CallsEndpoint(passed_on)(scope, receive, send))
    return sent[0]["status"], json.loads(sent[1]["body"]), engine


CALL = {"method": COUNTERS, "args": [1]}


@pytest.mark.parametrize("root", ["", "/vllm"])
def test_call_with_the_token_reaches_the_engine(root: str) -> None:
    status, answer, engine = ask(CALL, token=shared_token(), root=root)
    assert (status, answer) == (200, {"results": [{"draft/version": 3.0}]}) and engine.calls == [(COUNTERS, (1,))]


@pytest.mark.parametrize("token", [None, "", "wrong", "\u00e4"])
def test_call_without_the_token_does_not(token: str | None) -> None:
    """Every user of a machine can reach its loopback, and a push replaces weights."""
    status, answer, engine = ask(CALL, token=token)
    assert status == 401 and "token" in answer["error"] and not engine.calls


@pytest.mark.parametrize("body", [b"{", [], {"args": []}, {"method": COUNTERS, "args": 5}, {"method": ["x"]}])
def test_other_bodies_are_refused(body: object) -> None:
    status, _, engine = ask(body, token=shared_token())
    assert status == 400 and not engine.calls


def test_other_methods_of_workers_cannot_be_called() -> None:
    """/collective_rpc lets everything through; that is why it needs the dev mode."""
    status, answer, engine = ask({"method": "reload_weights"}, token=shared_token())
    assert status == 400 and COUNTERS in answer["error"] and not engine.calls


def test_error_of_the_engine_is_told() -> None:
    """`EngineWire` reads in it whether the scheduler is ours."""
    status, answer, _ = ask({"method": COUNTERS, "args": ["fail"]}, token=shared_token())
    assert (status, answer) == (500, {"error": "the worker is on fire"})


def test_other_paths_are_passed_on() -> None:
    assert ask(CALL, token=None, path="/v1/completions")[0] == 299
