"""Entry point `vllm.stat_logger_plugins`: our scheduler's metrics in `/metrics` of vLLM's API server.

Gauges have the names of the Prometheus sink (`selector/failures` is `paceline_selector_failures`) and vLLM's labels, in
vLLM's registry. Engines that do not speculate with our scheduler send no metrics and get no gauges.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING

from prometheus_client import Gauge
from vllm.v1.metrics.loggers import StatLoggerBase

from paceline.rollout.internals.stats import decode
from paceline.sinks import prometheus_name

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.metrics.stats import IterationStats, SchedulerStats

logger = logging.getLogger(__name__)


class StatLogger(StatLoggerBase):
    """Created by vLLM per engine. Never raises: vLLM would fail the requests of the step."""

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
            for key, value in decode(scheduler_stats).items():
                _gauge(key).labels(self._config.model_config.served_model_name, self._engine).set(value)
        except Exception:  # requests must continue
            self._failed = True
            logger.exception("Paceline's metrics in Prometheus end here")

    def log_engine_initialized(self) -> None:
        """Do nothing: vLLM requires the method."""


@cache
def _gauge(key: str) -> Gauge:
    """Return the gauge of all engines in this process: a registry takes a name once."""
    labels = ["model_name", "engine"]
    return Gauge(prometheus_name(key), key, labelnames=labels, multiprocess_mode="mostrecent")
