"""Experiment trackers as sinks, with the metric names of metrics.jsonl.

| `run.sinks`   | destination                                                                        |
|---------------|------------------------------------------------------------------------------------|
| `wandb`       | Weights & Biases, project `paceline`                                               |
| `tensorboard` | event files in the run's directory                                                 |
| `mlflow`      | experiment `paceline` of the store in MLFLOW_TRACKING_URI                          |
| `prometheus`  | gauges on this machine's loopback, `run.prometheus_port`; `/` in a name becomes `_` |
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config import Config
from paceline.metrics import Sink

if TYPE_CHECKING:
    from prometheus_client import Gauge

_WITH_METRICS = ("step", "eval")
"""Kinds of records with a step and metrics."""
_TEXTS = "eval/texts"
"""Key of sampled texts."""


class WandbSink:
    def __init__(self, config: Config, directory: Path) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        self._table = wandb.Table
        self._run = wandb.init(
            project="paceline", name=directory.name, dir=directory, config=config.model_dump(mode="json")
        )

    def write(self, kind: str, record: Mapping[str, Any]) -> None:
        if kind in _WITH_METRICS:
            self._run.log(dict(record["metrics"]), step=record["step"])
        elif kind == "texts":
            columns = ["which", "reward", "prompt_id", "prompt", "completion"]
            rows = [[text[column] for column in columns] for text in record["texts"]]
            self._run.log({_TEXTS: self._table(columns=columns, data=rows)}, step=record["step"])

    def close(self) -> None:
        self._run.finish()


class TensorBoardSink:
    def __init__(self, config: Config, directory: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter  # imports tensorboard

        self._writer = SummaryWriter(str(directory / "tensorboard"))
        self._writer.add_text("config", f"```json\n{config.model_dump_json(indent=2)}\n```")

    def write(self, kind: str, record: Mapping[str, Any]) -> None:
        if kind in _WITH_METRICS:
            for key, value in record["metrics"].items():
                self._writer.add_scalar(key, value, record["step"])
            self._writer.flush()
        elif kind == "texts":
            self._writer.add_text(_TEXTS, _markdown(record["texts"]), record["step"])

    def close(self) -> None:
        self._writer.close()


class MlflowSink:
    def __init__(self, config: Config, directory: Path) -> None:
        import mlflow  # pyright: ignore[reportMissingImports]

        self._mlflow = mlflow
        self._mlflow.set_experiment("paceline")
        self._mlflow.start_run(run_name=directory.name)
        self._mlflow.log_dict(config.model_dump(mode="json"), "config.json")

    def write(self, kind: str, record: Mapping[str, Any]) -> None:
        if kind in _WITH_METRICS:
            # MLflow refuses a batch with a NaN.
            metrics = {key: value for key, value in record["metrics"].items() if math.isfinite(value)}
            self._mlflow.log_metrics(metrics, step=record["step"])
        elif kind == "texts":
            self._mlflow.log_text(_markdown(record["texts"]), f"{_TEXTS}/step-{record['step']}.md")

    def close(self) -> None:
        self._mlflow.end_run()


class PrometheusSink:
    def __init__(self, config: Config, directory: Path) -> None:
        from prometheus_client import CollectorRegistry, Gauge, start_http_server

        registry = CollectorRegistry()  # vLLM uses the default registry
        self._new_gauge = partial(Gauge, labelnames=["run"], registry=registry)
        self._gauges: dict[str, Gauge] = {}
        self._run = directory.name
        self._server, self._thread = start_http_server(config.run.prometheus_port, addr="127.0.0.1", registry=registry)

    def write(self, kind: str, record: Mapping[str, Any]) -> None:
        if kind in _WITH_METRICS:
            for key, value in {"step": record["step"], **record["metrics"]}.items():
                name = prometheus_name(key)
                if name not in self._gauges:
                    self._gauges[name] = self._new_gauge(name, key)
                self._gauges[name].labels(run=self._run).set(value)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


SINKS = {"wandb": WandbSink, "tensorboard": TensorBoardSink, "mlflow": MlflowSink, "prometheus": PrometheusSink}


def open_sinks(config: Config, directory: Path) -> list[Sink]:
    """Open the trackers of `run.sinks` for the run in this directory."""
    sinks: list[Sink] = []
    for name in config.run.sinks:
        if name == "console":  # opened by the session
            continue
        try:
            sinks.append(SINKS[name](config, directory))
        except ModuleNotFoundError as error:
            raise ValueError(
                f"run.sinks: got {name}, which needs {error.name}; pip install 'paceline[{name}]'"
            ) from None
    return sinks


def _markdown(texts: Sequence[Mapping[str, Any]]) -> str:
    """Format sampled texts as indented blocks, so that no output of a policy becomes markup."""
    blocks: list[str] = []
    for text in texts:
        blocks.append(f"**{text['which']}, reward {text['reward']:g}** ({text['prompt_id']})")
        for part in ("prompt", "completion"):
            blocks.append("\n".join(f"    {line}" for line in text[part].splitlines()))
    return "\n\n".join(blocks) + "\n"


def prometheus_name(key: str) -> str:
    """Return the Prometheus name of a metric: paceline_time_generation_s for time/generation_s."""
    return "paceline_" + re.sub(r"[^a-zA-Z0-9_]", "_", key)
