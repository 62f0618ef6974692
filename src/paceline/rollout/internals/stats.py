"""Read vLLM's statistics of a step in a stat logger, and send our scheduler's metrics inside them.

    AdaptiveScheduler ── encode ──▶ SchedulerStats ──zmq──▶ AsyncLLM ── decode ──▶ StatLogger

vLLM decodes SchedulerStats by its declared fields and drops all others. Among its dicts, `waiting_lora_adapters` has no
reader in an engine without LoRA; with LoRA nothing is sent. The dict takes integers only, so metrics are sent in
millionths. `kv_connector_stats` would take floats, but vLLM asserts that a connector is configured.

Relied upon (vLLM documents that statistics "are not considered stable interfaces"):
  vllm/v1/metrics/stats.py          SchedulerStats: num_running_reqs, num_waiting_reqs, num_skipped_waiting_reqs,
                                    kv_cache_usage, prefix_cache_stats (queries, hits), spec_decoding_stats;
                                    waiting_lora_adapters, a dict[str, int], filled by AsyncLLM for LoRA only;
                                    IterationStats: num_generation_tokens, num_preempted_reqs
  vllm/v1/spec_decode/metrics.py    SpecDecodingStats: num_draft_tokens, num_accepted_tokens
  vllm/v1/metrics/loggers.py        StatLoggerBase: record(scheduler_stats, iteration_stats, mm_cache_stats,
                                    engine_idx), log, log_engine_initialized, record_sleep_state; `stat_loggers` of
                                    AsyncLLM takes factories; PrometheusStatLogger reads `waiting_lora_adapters` if
                                    there is a lora_config, and loggers of plugins come first
  vllm/v1/engine/__init__.py        EngineCoreOutputs.scheduler_stats, returned by `Scheduler.update_from_output`

Goes when vLLM's Prometheus metrics can be read in the process without a registry shared by all its engines, and
SchedulerStats has room for a scheduler's own statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.metrics.stats import IterationStats, SchedulerStats

TOTALS = (
    "generated_tokens",
    "preemptions",
    "drafted_tokens",
    "accepted_tokens",
    "prefix_cache_queries",
    "prefix_cache_hits",
)
GAUGES = ("running_requests", "waiting_requests", "kv_usage")
_PREFIX = "paceline:"


def totals(scheduler: SchedulerStats | None, iteration: IterationStats | None) -> dict[str, float]:
    """Return the increments of TOTALS in one record."""
    counted: dict[str, float] = {}
    if iteration is not None:
        counted["generated_tokens"] = iteration.num_generation_tokens
        counted["preemptions"] = iteration.num_preempted_reqs
    if scheduler is not None:
        counted["prefix_cache_queries"] = scheduler.prefix_cache_stats.queries
        counted["prefix_cache_hits"] = scheduler.prefix_cache_stats.hits
        if scheduler.spec_decoding_stats is not None:
            counted["drafted_tokens"] = scheduler.spec_decoding_stats.num_draft_tokens
            counted["accepted_tokens"] = scheduler.spec_decoding_stats.num_accepted_tokens
    return counted


def gauges(scheduler: SchedulerStats) -> dict[str, float]:
    """Return the current values of GAUGES."""
    return {
        "running_requests": float(scheduler.num_running_reqs),
        "waiting_requests": float(scheduler.num_waiting_reqs + scheduler.num_skipped_waiting_reqs),
        "kv_usage": scheduler.kv_cache_usage,
    }


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
