"""Our scheduler's figures in Prometheus: they travel in vLLM's statistics, and never fail the host."""

from __future__ import annotations

import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the stat logger is a subclass of vLLM's")

from prometheus_client import REGISTRY
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.loggers import PerEngineStatLoggerAdapter, StatLoggerBase
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from paceline.rollout.internals.stats import decode, encode
from paceline.rollout.stat_logger import StatLogger

PYPROJECT = Path(__file__).resolve().parents[3] / "pyproject.toml"
WITHOUT_LORA: Any = SimpleNamespace(lora_config=None, model_config=SimpleNamespace(served_model_name="policy"))
FIGURES = {"selector/failures": 3.0, "rollout/accepted_length": 2.25, "selector/expected_gain": float("nan")}


def sent(config: Any = WITHOUT_LORA) -> SchedulerStats:
    """Statistics of a step as the API server's process gets them."""
    outputs = {0: EngineCoreOutputs(), 1: EngineCoreOutputs(scheduler_stats=SchedulerStats(num_running_reqs=7))}
    encode(outputs, config, lambda: FIGURES)
    decoded = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(outputs[1]))
    assert decoded.scheduler_stats is not None
    return decoded.scheduler_stats


def shown(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, {"model_name": "policy", "engine": "0"} | labels)


def test_figures_arrive_and_leave_nothing_behind() -> None:
    """vLLM drops what its statistics do not declare, and would show a stranger in the dict as an adapter."""
    stats = sent()
    assert decode(stats) == {"selector/failures": 3.0, "rollout/accepted_length": 2.25}
    assert stats == SchedulerStats(num_running_reqs=7)


def test_engine_with_lora_keeps_its_statistics_to_itself() -> None:
    assert sent(SimpleNamespace(lora_config=object())) == SchedulerStats(num_running_reqs=7)


def test_every_engine_of_a_process_has_its_gauges() -> None:
    """A registry takes a name once: the second engine, or the second AsyncLLM, would fail."""
    for engine, _ in ((0, "first"), (1, "of another rank"), (0, "started again")):
        StatLogger(WITHOUT_LORA, engine).record(sent(), None, engine_idx=engine)
    for engine in "01":
        assert shown("paceline_selector_failures", engine=engine) == 3.0
        assert shown("paceline_rollout_accepted_length", engine=engine) == 2.25
    assert shown("paceline_selector_expected_gain") is None


def test_host_is_never_failed(caplog: pytest.LogCaptureFixture) -> None:
    """vLLM passes an error of a stat logger on to every request of the step."""
    planted: Any = SimpleNamespace(lora_config=None)  # no model_config to take the label from
    logger = StatLogger(planted, 0)
    for _ in range(3):
        logger.record(sent(), None)
        logger.record(None, None)
    logger.log_engine_initialized()
    assert [record.message for record in caplog.records] == ["Paceline's metrics in Prometheus end here"]


def test_stock_engine_gets_no_gauges() -> None:
    before = {metric.name for metric in REGISTRY.collect()}
    StatLogger(WITHOUT_LORA, 5).record(SchedulerStats(), None)
    assert {metric.name for metric in REGISTRY.collect()} == before
    assert shown("paceline_selector_failures", engine="5") is None


def test_vllm_takes_the_entry_point_for_a_stat_logger() -> None:
    """`vllm serve` does not start with a plugin that is no subclass of its own."""
    declared = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]["entry-points"]
    (value,) = declared["vllm.stat_logger_plugins"].values()
    plugin = EntryPoint("paceline", value, "vllm.stat_logger_plugins").load()
    assert issubclass(plugin, StatLoggerBase)
    adapter = PerEngineStatLoggerAdapter(WITHOUT_LORA, [6], plugin)
    adapter.log_engine_initialized()
    adapter.record(sent(), None, mm_cache_stats=None, engine_idx=6)
    assert shown("paceline_selector_failures", engine="6") == 3.0
