"""Calls to an engine behind a server: arguments and answers as JSON, and errors that say what to do."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from paceline.files import shared_token
from paceline.integrations.engine_wire import EngineWire, ServerGoneError, http_rpc
from paceline.types import PacelineError


class Handler(BaseHTTPRequestHandler):
    """vLLM's `POST /collective_rpc`, with `server.answer` as the workers."""

    def do_POST(self) -> None:
        server: Any = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.calls.append((self.path, body["method"], body["args"]))
        server.tokens.append(self.headers["Authorization"])
        status, text = server.answer if self.path in server.doors else (404, "Not Found")
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[Any]:
    server: Any = HTTPServer(("127.0.0.1", 0), Handler)
    server.calls, server.tokens, server.doors = [], [], ["/collective_rpc"]
    server.answer = (200, json.dumps({"results": [{"draft/version": 2.0}]}))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def wire_to(server: Any) -> EngineWire:
    return EngineWire(http_rpc(f"http://127.0.0.1:{server.server_port}/"))


def test_call_and_answer_go_through_json(server: Any) -> None:
    assert wire_to(server).counters() == {"draft/version": 2.0}
    assert server.calls == [("/collective_rpc", "paceline_counters", [])]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((404, "Not Found"), "start the server with --middleware"),
        ((500, "Call to collective_rpc method failed: Method 'x' is not implemented."), "PACELINE="),
        ((500, "Worker failed: 'CPUWorker' object has no attribute 'paceline_counters'"), "PACELINE="),
        ((200, "<html>"), "unlike a vLLM server"),
        ((200, "[]"), "unlike a vLLM server"),
        ((500, "out of memory"), "answered 500 to paceline_counters: out of memory"),
    ],
)
def test_error_says_what_to_do(server: Any, answer: tuple[int, str], said: str) -> None:
    """Each of these is a server that was started without something."""
    server.answer = answer
    with pytest.raises(PacelineError, match=said):
        wire_to(server).counters()


def test_server_without_dev_mode_is_asked_at_our_endpoint_with_the_token(server: Any) -> None:
    """The token is for our endpoint alone, and a server that was started otherwise since is found again."""
    server.doors, wire = ["/paceline/calls"], wire_to(server)
    for _ in range(2):
        assert wire.counters() == {"draft/version": 2.0}
    assert [path for path, _, _ in server.calls] == ["/collective_rpc", "/paceline/calls", "/paceline/calls"]
    assert server.tokens == [None, *[f"Bearer {shared_token()}"] * 2]
    server.doors = ["/collective_rpc"]
    assert wire.counters() == {"draft/version": 2.0} and server.tokens[-1] is None


def test_proxy_is_not_asked_for_a_server_on_this_machine(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clusters set one for everything, and it cannot reach our loopback."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert wire_to(server).counters() == {"draft/version": 2.0}


def test_dead_server_is_told_from_one_that_answers(server: Any) -> None:
    """One is waited for, the other is not."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        with pytest.raises(ServerGoneError, match="refused"):
            EngineWire(http_rpc(f"http://127.0.0.1:{nobody.getsockname()[1]}")).counters()


def test_address_must_be_a_servers() -> None:
    """urllib would read a file as well."""
    with pytest.raises(ValueError, match="must begin with http"):
        http_rpc("file:///etc/passwd")
