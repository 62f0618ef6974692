"""Figures of our scheduler on their way to the API server's process, in vLLM's statistics of a step.

    AdaptiveScheduler ── board ──▶ SchedulerStats ──zmq──▶ AsyncLLM ── alight ──▶ StatLogger

vLLM decodes SchedulerStats by the fields that it declares, so a field of our own would be dropped on the way. Of the
fields that are dicts, `waiting_lora_adapters` is read by nobody in an engine without LoRA; with LoRA nothing is sent.
It takes whole numbers only, so figures travel in millionths.

Relied upon:
  vllm/v1/metrics/stats.py      SchedulerStats.waiting_lora_adapters, a dict[str, int], filled by AsyncLLM for LoRA only
  vllm/v1/metrics/loggers.py    PrometheusStatLogger reads it if there is a lora_config; loggers of plugins come first
  vllm/v1/engine/__init__.py    EngineCoreOutputs.scheduler_stats, in what `Scheduler.update_from_output` returns

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

_SEAT = "paceline:"


def board(
    outputs: Mapping[int, EngineCoreOutputs], vllm_config: VllmConfig, figures: Callable[[], Mapping[str, float]]
) -> None:
    """Put figures into a step's statistics, if it has any; they are not asked for otherwise."""
    for output in outputs.values():
        if output.scheduler_stats is not None and vllm_config.lora_config is None:
            output.scheduler_stats.waiting_lora_adapters |= {
                f"{_SEAT}{key}": round(value * 1e6) for key, value in figures().items() if isfinite(value)
            }
            return


def alight(stats: SchedulerStats) -> dict[str, float]:
    """Take the figures out again."""
    adapters = stats.waiting_lora_adapters
    keys = [key for key in adapters if key.startswith(_SEAT)]
    return {key.removeprefix(_SEAT): adapters.pop(key) / 1e6 for key in keys}
