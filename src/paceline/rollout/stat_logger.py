"""Entry point `vllm.stat_logger_plugins`: our scheduler's figures in `/metrics` of vLLM's API server.

Gauges have the names of the Prometheus sink (`selector/failures` is `paceline_selector_failures`) and the labels of
vLLM's own. They stand in the registry that vLLM serves. An engine that does not speculate with our scheduler sends no
figures, and gets no gauges.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING

from prometheus_client import Gauge
from vllm.v1.metrics.loggers import StatLoggerBase

from paceline.rollout.internals.stats_passenger import alight
from paceline.sinks import prometheus_name

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.metrics.stats import IterationStats, SchedulerStats

logger = logging.getLogger(__name__)


class StatLogger(StatLoggerBase):
    """Made by vLLM, one for each engine. It never raises: vLLM would fail the requests of the step."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self._config, self._engine = vllm_config, str(engine_index)
        self._failed = False

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: object = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is None or self._failed:
            return
        try:
            for key, value in alight(scheduler_stats).items():
                _gauge(key).labels(self._config.model_config.served_model_name, self._engine).set(value)
        except Exception:  # whatever it is, requests go on
            self._failed = True
            logger.exception("no more figures of Paceline in Prometheus")

    def log_engine_initialized(self) -> None:
        """vLLM asks for a log line; there is nothing to say."""


@cache
def _gauge(key: str) -> Gauge:
    """One for all engines of this process: a registry takes a name once."""
    return Gauge(
        prometheus_name(key), key, labelnames=["model_name", "engine"], multiprocess_mode="mostrecent"
    )  # the value of the API server that heard last
