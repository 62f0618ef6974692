"""Trackers: what reaches them has the names and values of metrics.jsonl."""

from __future__ import annotations

import json
import re
import socket
import sys
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.config import Config
from paceline.sinks import SINKS, open_sinks, prometheus_name

DOCS = Path(__file__).resolve().parents[2] / "docs"
TEXTS = {
    "step": 6,
    "time_s": 2.5,
    "texts": [
        {"which": "best", "reward": 1.0, "prompt_id": "heldout/3", "prompt": "1+1=", "completion": "2"},
        {"which": "worst", "reward": 0.0, "prompt_id": "heldout/0", "prompt": "2+2=\n", "completion": "# so\n\n```5"},
    ],
}
TEXTS_AS_MARKDOWN = (
    "**best, reward 1** (heldout/3)\n\n    1+1=\n\n    2\n\n"
    "**worst, reward 0** (heldout/0)\n\n    2+2=\n\n    # so\n    \n    ```5\n"
)
RECORD = {"step": 3, "metrics": {"reward/mean": 0.5, "time/generation_s": 2.0}}


def config(sink: str) -> Config:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free_port = probe.getsockname()[1]
    return Config.model_validate(
        {"policy": {"model": "arena:small"}, "run": {"sinks": [sink], "prometheus_port": free_port}}
    )


def test_prometheus_serves_the_last_values_on_loopback_and_lets_the_port_go(tmp_path: Path) -> None:
    settings = config("prometheus")
    address = f"http://127.0.0.1:{settings.run.prometheus_port}/metrics"
    for _ in range(2):  # a second run of this process takes the port again
        (sink,) = open_sinks(settings, tmp_path / "a-run")
        sink.write("step", {"step": 2, "metrics": {"reward/mean": 0.25}})
        sink.write("step", RECORD)
        sink.write("stage", {"step": 3, "stage": "sync", "time_s": 1.0})
        sink.write("texts", TEXTS)  # has nothing for gauges
        page = urllib.request.urlopen(address).read().decode()
        sink.close()
        assert 'paceline_reward_mean{run="a-run"} 0.5' in page
        assert 'paceline_time_generation_s{run="a-run"} 2.0' in page
        assert 'paceline_step{run="a-run"} 3.0' in page


def test_tensorboard_gets_every_metric_at_its_step(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import (  # pyright: ignore[reportMissingImports]
        EventAccumulator,
    )

    (sink,) = open_sinks(config("tensorboard"), tmp_path)
    sink.write("step", RECORD)
    sink.write("texts", TEXTS)
    sink.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    (shown,) = events.Tensors("eval/texts/text_summary")
    assert (shown.step, shown.tensor_proto.string_val[0].decode()) == (6, TEXTS_AS_MARKDOWN)
    assert {key: [(e.step, e.value) for e in events.Scalars(key)] for key in RECORD["metrics"]} == {
        "reward/mean": [(3, 0.5)],
        "time/generation_s": [(3, 2.0)],
    }


def test_mlflow_gets_every_metric_that_is_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(f"file:{tmp_path}/store")
    (sink,) = open_sinks(config("mlflow"), tmp_path / "a-run")
    sink.write("step", {"step": 3, "metrics": {**RECORD["metrics"], "mismatch/k3": float("nan")}})
    sink.write("texts", TEXTS)
    run = mlflow.active_run()
    assert mlflow.artifacts.load_text(f"{run.info.artifact_uri}/eval/texts/step-6.md") == TEXTS_AS_MARKDOWN
    sink.close()
    assert mlflow.get_run(run.info.run_id).data.metrics == RECORD["metrics"]


def test_wandb_gets_metrics_and_texts_as_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a stand-in that keeps what it is given: the real one wants an account or a directory of its own."""
    logged: list[tuple[int, dict[str, Any]]] = []
    run = SimpleNamespace(log=lambda values, step: logged.append((step, values)), finish=lambda: None)
    wandb = SimpleNamespace(init=lambda **_: run, Table=lambda columns, data: (columns, data))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    (sink,) = open_sinks(config("wandb"), tmp_path)
    sink.write("step", RECORD)
    sink.write("texts", TEXTS)
    sink.write("stage", {"step": 6, "stage": "sync", "time_s": 1.0})
    columns = ["which", "reward", "prompt_id", "prompt", "completion"]
    rows = [["best", 1.0, "heldout/3", "1+1=", "2"], ["worst", 0.0, "heldout/0", "2+2=\n", "# so\n\n```5"]]
    assert logged == [(3, RECORD["metrics"]), (6, {"eval/texts": (columns, rows)})]


def test_a_tracker_that_is_not_installed_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object) -> None:
        raise ModuleNotFoundError("No module named 'wandb'", name="wandb")

    monkeypatch.setitem(SINKS, "wandb", missing)
    with pytest.raises(ValueError, match=r"got wandb, which needs wandb; pip install 'paceline\[wandb\]'"):
        open_sinks(config("wandb"), tmp_path)


def test_dashboard_asks_for_metrics_that_are_documented() -> None:
    dashboard = json.loads((DOCS / "grafana.json").read_text())
    asked = {panel["targets"][0]["expr"].split("{")[0] for panel in dashboard["panels"]}
    documented = {prometheus_name(key) for key in re.findall(r"`([a-z_0-9]+/\w+)`", (DOCS / "metrics.md").read_text())}
    assert asked - documented == set()
