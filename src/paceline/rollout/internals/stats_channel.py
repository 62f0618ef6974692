"""Send metrics of our scheduler to the API server's process, inside vLLM's statistics of a step.

    AdaptiveScheduler ── encode ──▶ SchedulerStats ──zmq──▶ AsyncLLM ── decode ──▶ StatLogger

vLLM decodes SchedulerStats by its declared fields and drops all others. Among its dicts, `waiting_lora_adapters` has no
reader in an engine without LoRA; with LoRA nothing is sent. The dict takes integers only, so metrics are sent in
millionths. `kv_connector_stats` would take floats, but vLLM asserts that a connector is configured.

Relied upon:
  vllm/v1/metrics/stats.py      SchedulerStats.waiting_lora_adapters, a dict[str, int], filled by AsyncLLM for LoRA only
  vllm/v1/metrics/loggers.py    PrometheusStatLogger reads it if there is a lora_config; loggers of plugins come first
  vllm/v1/engine/__init__.py    EngineCoreOutputs.scheduler_stats, returned by `Scheduler.update_from_output`

Goes when SchedulerStats has room for a scheduler's own statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.metrics.stats import SchedulerStats

_PREFIX = "paceline:"


def encode(
    outputs: Mapping[int, EngineCoreOutputs], vllm_config: VllmConfig, metrics: Callable[[], Mapping[str, float]]
) -> None:
    """Add metrics to the statistics of a step. Without statistics, `metrics` is not called."""
    for output in outputs.values():
        if output.scheduler_stats is not None and vllm_config.lora_config is None:
            output.scheduler_stats.waiting_lora_adapters |= {
                f"{_PREFIX}{key}": round(value * 1e6) for key, value in metrics().items() if isfinite(value)
            }
            return


def decode(stats: SchedulerStats) -> dict[str, float]:
    """Remove the metrics from the statistics and return them."""
    adapters = stats.waiting_lora_adapters
    keys = [key for key in adapters if key.startswith(_PREFIX)]
    return {key.removeprefix(_PREFIX): adapters.pop(key) / 1e6 for key in keys}
