"""Read vLLM's statistics, which its stat loggers receive after every step.

vLLM documents that they "are not considered stable interfaces".

Relied upon:
  vllm/v1/metrics/stats.py          SchedulerStats: num_running_reqs, num_waiting_reqs, num_skipped_waiting_reqs,
                                    kv_cache_usage, prefix_cache_stats (queries, hits), spec_decoding_stats;
                                    IterationStats: num_generation_tokens, num_preempted_reqs
  vllm/v1/spec_decode/metrics.py    SpecDecodingStats: num_draft_tokens, num_accepted_tokens
  vllm/v1/metrics/loggers.py        StatLoggerBase: record(scheduler_stats, iteration_stats, mm_cache_stats,
                                    engine_idx), log, log_engine_initialized, record_sleep_state; `stat_loggers` of
                                    AsyncLLM takes factories

Goes when vLLM's Prometheus metrics can be read in the process without a registry shared by all its engines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
    waiting = scheduler.num_waiting_reqs + scheduler.num_skipped_waiting_reqs
    return {
        "running_requests": float(scheduler.num_running_reqs),
        "waiting_requests": float(waiting),
        "kv_usage": scheduler.kv_cache_usage,
    }
