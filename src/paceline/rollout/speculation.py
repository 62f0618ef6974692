"""Speculation in vLLM's own words: which drafter, and which scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.config import EagleDrafter, EngineConfig, HistoryDrafter, NgramDrafter, ParallelDrafter, SpeculationConfig

FP8_WEIGHTS = "fp8_per_block"
"""vLLM's name for what `fp8.quantise_blocks` does."""


def scheduler_settings(config: SpeculationConfig) -> dict[str, Any]:
    """A `scheduler.SchedulerSettings` as plain data, for vLLM's `additional_config`."""
    return {
        "selector": config.selector.model_dump(mode="json"),
        "drafter": config.drafter.model_dump(mode="json"),
    }


def speculative_config(config: SpeculationConfig, engine: EngineConfig) -> dict[str, Any]:
    length = config.max_draft_length
    # The table says to vLLM that the draft length changes at run time (it bears on CUDA graphs); the scheduler
    # overrules it.
    settings: dict[str, Any] = {
        "num_speculative_tokens": length,
        "num_speculative_tokens_per_batch_size": [(1, engine.max_num_seqs, length)],
    }
    match config.drafter:
        case NgramDrafter(min_match=shortest, max_match=longest):
            return settings | {"method": "ngram", "prompt_lookup_min": shortest, "prompt_lookup_max": longest}
        case HistoryDrafter():
            return settings | {"method": "custom_class", "model": "paceline.rollout.proposer.HistoryProposer"}
        case (
            EagleDrafter(kind=method, path=path, draft_sampling=how)
            | ParallelDrafter(kind=method, path=path, draft_sampling=how)
        ):
            quantised = {"quantization": FP8_WEIGHTS} if config.drafter.weights == "fp8" else {}
            return settings | {"method": method, "model": path, "draft_sample_method": how} | quantised


def scheduler_class(config: SpeculationConfig, *, cpu: bool) -> str:
    """vLLM schedules ahead of the results on GPUs, except for drafters that need the sampled tokens on the host."""
    on_host = isinstance(config.drafter, NgramDrafter | HistoryDrafter)
    return f"paceline.rollout.scheduler.{'AdaptiveScheduler' if cpu or on_host else 'AsyncAdaptiveScheduler'}"


def check_drafter(config: SpeculationConfig, model_path: Path, engine: EngineConfig) -> None:
    """Refuse a learned drafter that does not fit the policy, before an engine is started for it."""
    if isinstance(config.drafter, EagleDrafter | ParallelDrafter):
        from paceline.drafters.checkpoint import preflight

        preflight(Path(config.drafter.path), model_path, kind=config.drafter.kind, max_model_len=engine.max_model_len)
