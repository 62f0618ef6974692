"""A sidecar beside a server: better drafters reach it, and what goes wrong is said, counted or waited for."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from contexts import make_context
from host_engine import HostEngine
from paceline.config import BufferConfig, DrafterTrainingConfig
from paceline.drafters.provenance import read_provenance
from paceline.integrations.engine_wire import ServerGoneError
from paceline.metrics import read_metrics
from paceline.sessions import sidecar
from paceline.sessions.sidecar import SidecarSettings, run_sidecar
from paceline.types import PacelineError
from random_policy import VOCABULARY, aged, make_drafter, make_policy

SHARED_MEMORY = Path("/dev/shm")


class Handler(BaseHTTPRequestHandler):
    """vLLM's `POST /collective_rpc` before a HostEngine."""

    def do_POST(self) -> None:
        server: Any = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status, answer = 404, "Not Found"
        if server.dev_mode and self.path == "/collective_rpc":
            try:
                status, answer = 200, json.dumps({"results": server.engine.rpc(body["method"], body["args"])})
            except NotImplementedError as error:
                status, answer = 500, f"Call to collective_rpc method failed: {error}"
        self.send_response(status)
        self.end_headers()
        self.wfile.write(answer.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A policy that was written a while ago, and a drafter for it."""
    policy = aged(make_policy(tmp_path_factory.mktemp("policy")), 60)
    return policy, make_drafter(policy, tmp_path_factory.mktemp("drafter") / "drafter")


@pytest.fixture
def server(checkpoints: tuple[Path, Path]) -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.engine, server.dev_mode = HostEngine(checkpoints[1]), True
    server.url = f"http://localhost:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def write_rollouts(file: Path, num: int, *, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = [
        {
            "prompt_ids": rng.integers(2, VOCABULARY, 5).tolist(),
            "response_ids": rng.integers(2, VOCABULARY, 25).tolist(),
        }
        for _ in range(num)
    ]
    file.parent.mkdir(exist_ok=True)
    with file.open("a") as lines:
        lines.writelines(f"{json.dumps(row)}\n" for row in rows)


@pytest.fixture
def settings(server: Any, checkpoints: tuple[Path, Path], tmp_path: Path) -> SidecarSettings:
    write_rollouts(tmp_path / "rollouts" / "1.jsonl", 60, seed=1)
    return SidecarSettings(
        server=server.url,
        rollouts=tmp_path / "rollouts",
        policies=(checkpoints[0], tmp_path / "run"),
        share=1.0,
        period_s=0.5,
        rounds=2,
        training=DrafterTrainingConfig(
            when="always",
            tokens_per_step=200,
            round_tokens=800,
            buffer=BufferConfig(directory=tmp_path / "buffer", heldout_share=0.3),
        ),
    )


def run(settings: SidecarSettings, on_line: Callable[[str], None] = lambda line: None) -> list[str]:
    """Return what the sidecar said."""
    lines: list[str] = []

    def report(line: str) -> None:
        lines.append(line)
        on_line(line)

    run_sidecar(settings, make_context(report=report))
    return lines


def segments() -> set[str]:
    return {path.name for path in SHARED_MEMORY.glob("paceline-*-drafter-*")}


def until_published(engine: HostEngine, times: int) -> Callable[[str], None]:
    """Interrupt a sidecar without an end, as Ctrl-C does, once the engine has got so many drafters."""

    def on_line(line: str) -> None:
        if line.startswith("round") and engine.num_pushes >= times:
            raise KeyboardInterrupt

    return on_line


def test_better_drafter_reaches_the_server_and_nothing_is_left_behind(
    server: Any, settings: SidecarSettings, tmp_path: Path
) -> None:
    """What the server has, what is kept in --out and what is recorded must be the same drafter."""
    engine, before = server.engine, segments()
    (settings.rollouts / "2.jsonl").write_text('{"prompt_ids": [5]}\n')
    settings = replace(settings, rounds=None, out=tmp_path / "out", metrics=tmp_path / "sidecar.jsonl")
    lines: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        run(settings, lambda line: (lines.append(line), engine.generate(1.2), until_published(engine, 1)(line))[0])
    assert engine.version == engine.num_pushes == 1
    assert any("eagle3" in line for line in lines) and any("accepted length" in line for line in lines)
    assert sum("1 invalid lines so far" in line and "2.jsonl" in line for line in lines) == 1
    kept = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(kept[name], weight) for name, weight in engine.weights.items())
    steps = read_metrics(tmp_path / "sidecar.jsonl")["step"]
    last = steps[-1]["metrics"]
    assert last["draft/published_round"] == 1 and last["draft/broken_lines"] == 1 and last["draft/failures"] == 0
    assert last["draft/heldout_after"] > last["draft/heldout_before"]
    assert last["rollout/accepted_length"] == pytest.approx(1.2)
    assert steps[0]["metrics"]["draft/new_rollouts"] == steps[0]["metrics"]["draft/scored_rollouts"] == 60
    assert steps[0]["metrics"]["rollout/num_tokens"] == 60 * 25
    assert read_provenance(tmp_path / "out").num_tokens == last["draft/tokens_trained"]
    assert segments() == before and not any((tmp_path / "buffer" / f"paceline-{os.getuid()}").iterdir())


def test_server_that_started_again_gets_the_drafter_anew(server: Any, settings: SidecarSettings) -> None:
    engine = server.engine
    restarted = False

    def restart_once(line: str) -> None:
        nonlocal restarted
        if line.startswith("round") and engine.num_pushes and not restarted:
            restarted = True
            engine.restart()
        until_published(engine, 2)(line)

    with pytest.raises(KeyboardInterrupt):
        run(replace(settings, rounds=None), restart_once)
    assert restarted and engine.weights and engine.version >= 2


def test_server_that_does_not_answer_is_waited_for(
    server: Any, settings: SidecarSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It loads a policy for minutes; but nobody waits for ever for one that has ended."""
    monkeypatch.setattr(sidecar, "_LOOK_S", 0.01)
    gone = replace(settings, server="http://127.0.0.1:9")  # nobody listens at the port "discard"
    waited: list[str] = []
    monkeypatch.setattr(sidecar, "_PATIENCE_S", 0.5)
    with pytest.raises(ServerGoneError, match="refused"):
        run(gone, waited.append)
    assert len(waited) == 1 and waited[0].startswith("waiting: no answer from http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        ("no dev mode", "paceline.rollout.endpoint.CallsEndpoint"),
        ("another scheduler", "PACELINE=speculation.toml"),
        ("no drafter", "cannot be trained: this engine runs without"),
    ],
)
def test_server_that_lacks_something_is_told_what(
    trouble: str, said: str, server: Any, settings: SidecarSettings
) -> None:
    """At once: waiting would not mend it."""
    server.dev_mode, server.engine.ours = trouble != "no dev mode", trouble != "another scheduler"
    if trouble == "no drafter":
        server.engine.problem = "this engine runs without a learned drafter"
    with pytest.raises(PacelineError, match=said):
        run(settings)


def test_refused_drafters_end_the_sidecar_with_the_reason(server: Any, settings: SidecarSettings) -> None:
    """One that trained on for ever in vain would look like one that works."""
    server.engine.refuse = "drafter: planted"
    lines: list[str] = []
    with pytest.raises(PacelineError, match="drafter training has ended"):
        run(replace(settings, rounds=None), lines.append)
    assert any("planted" in line for line in lines) and server.engine.version == 0


def test_newer_policy_is_taken_and_a_broken_one_is_told(
    server: Any, settings: SidecarSettings, checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    """The host goes on saving while the sidecar runs."""

    def save_another(line: str) -> None:
        for number, weights in ((1, None), (2, b"{}")):
            path = tmp_path / "run" / f"checkpoint-{number}"
            if line.startswith(f"round {number}"):
                shutil.copytree(checkpoints[0], path)
                if weights is not None:
                    (path / "config.json").write_bytes(weights)
                aged(path, 30 - number)

    lines = run(replace(settings, rounds=3), save_another)
    assert [line for line in lines if line.startswith("policy ")] == [
        f"policy {checkpoints[0]}",
        f"policy {tmp_path / 'run' / 'checkpoint-1'}",
    ]
    assert sum("using the previous one" in line for line in lines) == 1


@pytest.mark.parametrize("url", ["http://10.0.0.7:8000", "http://server.example:8000", "http://[2001:db8::1]:8000"])
def test_server_elsewhere_is_refused(url: str, settings: SidecarSettings) -> None:
    """Weights go through shared memory; and a token is not for other machines."""
    with pytest.raises(ValueError, match="shared memory"):
        replace(settings, server=url)


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "http://[::1]:8000", "http://0.0.0.0:8000"])
def test_server_here_is_taken(url: str, settings: SidecarSettings) -> None:
    assert replace(settings, server=url).server == url


@pytest.mark.parametrize("changes", [{"share": 0.0}, {"share": 1.5}, {"period_s": 0.0}, {"out": Path("/tmp")}])
def test_settings_that_cannot_be_are_refused(changes: dict[str, Any], settings: SidecarSettings) -> None:
    """A directory that is there would be removed by the first drafter that is kept."""
    with pytest.raises(ValueError, match=r"--(share|period|out): got"):
        replace(settings, **changes)


def test_command_ends_by_sigterm_and_cleans_up(server: Any, settings: SidecarSettings, tmp_path: Path) -> None:
    """Clusters end jobs so; weights and rollouts must not stay in shared memory."""
    words = ["--server", server.url, "--rollouts", settings.rollouts, "--policy", settings.policies[0]]
    training = settings.training
    overrides = [
        f"speculation.training.buffer.directory={tmp_path / 'buffer'}",
        "speculation.training.buffer.heldout_share=0.3",
        "speculation.training.when=always",
        f"speculation.training.tokens_per_step={training.tokens_per_step}",
        f"speculation.training.round_tokens={training.round_tokens}",
    ]
    before = segments()
    command = [
        sys.executable,
        "-m",
        "paceline.cli",
        "sidecar",
        *map(str, words),
        *overrides,
        "--period",
        "0.5",
        "--share",
        "1",
    ]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=os.environ | {"PACELINE_CACHE": str(tmp_path)}
    )
    assert process.stderr is not None
    lines: list[str] = []
    for line in process.stderr:
        lines.append(line)
        if server.engine.num_pushes:
            process.send_signal(signal.SIGTERM)
            break
    _, rest = process.communicate(timeout=120)
    assert process.returncode == 0, "".join(lines) + rest
    assert "the server keeps its current drafter" in rest
    assert segments() == before and not any((tmp_path / "buffer" / f"paceline-{os.getuid()}").iterdir())


def test_settings_of_other_things_are_refused(settings: SidecarSettings, capsys: pytest.CaptureFixture[str]) -> None:
    """They would have no effect, and nobody would know."""
    from paceline import cli

    words = ["sidecar", "--server", settings.server, "--rollouts", "r", "--policy", "p", "rollout.temperature=1"]
    assert cli.main(words) == 2
    assert "must begin with speculation.training." in capsys.readouterr().err
