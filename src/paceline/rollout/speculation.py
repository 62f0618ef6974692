"""Translate speculation settings for vLLM: drafter, scheduler, CUDA graphs. Refuse settings that are not lossless."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from paceline.config import (
    EagleDrafter,
    EngineConfig,
    FixedSelector,
    HistoryDrafter,
    NgramDrafter,
    ParallelDrafter,
    SpeculationConfig,
    TableSelector,
    VllmDrafter,
)
from paceline.selector.graphs import CapturePlan, GraphMemory, length_table, plan_capture

FP8_WEIGHTS = "fp8_per_block"
"""vLLM's name of the quantization in `fp8.quantize_blocks`."""
SCHEDULER = "paceline.rollout.scheduler.AdaptiveScheduler"
KEEP_LAST_BLOCK = "disable_eagle_block_drop"
"""vLLM's setting, since 0.30, to reuse the last block of a cached prefix with a learned drafter. By default vLLM
recomputes that block, because EAGLE's KV at a position depends on the next token, which may differ after a block.
Siblings have the same prompt, so it never differs, and DFlash's KV does not depend on it. Otherwise a draft may be
worse; outputs are verified in any case."""
NGRAM_MATCH = (2, 4)
"""Shortest and longest repeated run of tokens that vLLM's n-gram drafter looks up."""
_GRAPH_MEMORY = GraphMemory(per_graph_gb=0.002, per_token_gb=0.00006)
"""From captures logged in vLLM's pull requests 22897 and 23184: about 7 MiB for 100 tokens, 26 MiB for 450. Not
measured by us."""

# Keys of speculative_config, in vLLM and its forks, that trade the policy's distribution for acceptance.
_LOSSY_KEYS = (
    "synthetic_acceptance_rates",
    "synthetic_acceptance_length",
    "posterior_threshold",
    "posterior_alpha",
    "typical_acceptance_sampler_posterior_threshold",
    "typical_acceptance_sampler_posterior_alpha",
)
_LOSSLESS_METHODS = ("standard", "block")  # block verification (Sun et al. 2024) is lossless too


class Unhashed:
    """Settings in vLLM's `additional_config` without effect on its compile cache: vLLM hashes a plain dict, file names
    included, and would recompile at every start."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings

    def compute_hash(self) -> str:
        """Return a constant: scheduler and model-free drafters change no compiled code. Called by vLLM."""
        return "paceline"


def own_settings(additional_config: object) -> dict[str, Any]:
    """Return our settings in vLLM's `additional_config`, a dict (`vllm serve --additional-config`) or `Unhashed`."""
    if isinstance(additional_config, Unhashed):
        return additional_config.settings
    return cast("dict[str, Any]", additional_config).get("paceline", {}) if isinstance(additional_config, dict) else {}


def scheduler_settings(config: SpeculationConfig, plan: CapturePlan | None = None) -> dict[str, Any]:
    """Return a `scheduler.SchedulerSettings` as plain data for vLLM's `additional_config`."""
    # Configured lengths are used even without a graph, and drafts are made even if no length has one.
    fixed = isinstance(config.selector, FixedSelector | TableSelector)
    return {
        "draft_lengths": None if plan is None or fixed or plan.draft_lengths == (0,) else plan.draft_lengths,
        "selector": config.selector.model_dump(mode="json"),
        "drafter": config.drafter.model_dump(mode="json"),
        "verification": config.verification,
    }


def graph_plan(config: SpeculationConfig, engine: EngineConfig) -> CapturePlan:
    """Choose CUDA graphs for every draft length that the scheduler may use."""
    match config.selector:
        case FixedSelector(draft_length=length):
            lengths: Sequence[int] = (min(length, config.max_draft_length),)
        case TableSelector(ranges=ranges):
            lengths = [min(length, config.max_draft_length) for _, _, length in ranges]
        case _:
            lengths = range(config.max_draft_length + 1)
    return plan_capture(
        max_num_requests=engine.max_num_seqs,
        draft_lengths=lengths,
        memory=_GRAPH_MEMORY,
        budget_gb=engine.cuda_graph_gb,
    )


def speculative_config(
    config: SpeculationConfig, engine: EngineConfig, plan: CapturePlan | None = None
) -> dict[str, Any]:
    """Return vLLM's speculative_config. `plan` has the draft lengths with CUDA graphs; None allows all lengths."""
    lengths = range(config.max_draft_length + 1) if plan is None else plan.draft_lengths
    settings: dict[str, Any] = {
        "num_speculative_tokens": config.max_draft_length,
        # vLLM captures graphs for the draft lengths in this table; the scheduler decides when to use them.
        "num_speculative_tokens_per_batch_size": length_table(lengths, engine.max_num_seqs),
    }
    match config.drafter:
        case NgramDrafter():
            shortest, longest = NGRAM_MATCH
            return settings | {"method": "ngram", "prompt_lookup_min": shortest, "prompt_lookup_max": longest}
        case HistoryDrafter():
            return settings | {"method": "custom_class", "model": "paceline.rollout.proposer.HistoryProposer"}
        case (
            EagleDrafter(kind=method, path=path, draft_sampling=how)
            | ParallelDrafter(kind=method, path=path, draft_sampling=how)
        ):
            quantized = {"quantization": FP8_WEIGHTS} if config.drafter.weights == "fp8" else {}
            learned = {"method": method, "model": path, "draft_sample_method": how, KEEP_LAST_BLOCK: True}
            return settings | learned | quantized
        case VllmDrafter(settings=theirs):
            if why_whole(theirs):
                del settings["num_speculative_tokens_per_batch_size"]  # vLLM would draft by it
            return settings | theirs


def refuse_lossy(speculative_config: Mapping[str, Any]) -> None:
    """Raise if vLLM's speculative_config changes the policy's distribution."""
    method = speculative_config.get("rejection_sample_method", "standard")
    if method not in _LOSSLESS_METHODS:
        raise ValueError(
            f"speculative_config.rejection_sample_method: got {method!r}; must be one of "
            f"{', '.join(_LOSSLESS_METHODS)} because the policy would be trained on tokens that it did not sample"
        )
    acceptance = speculative_config.get("acceptance_method", "rejection_sampler")
    if acceptance != "rejection_sampler":
        raise ValueError(
            f"speculative_config.acceptance_method: got {acceptance!r}; must be 'rejection_sampler' because lenient "
            "acceptance changes the distribution"
        )
    for key in _LOSSY_KEYS:
        if speculative_config.get(key) is not None:
            raise ValueError(
                f"speculative_config.{key}: got {speculative_config[key]!r}; must be left out because acceptance "
                "independent of the policy's probabilities changes the distribution"
            )


def check_drafter(config: SpeculationConfig, model_path: Path, engine: EngineConfig) -> None:
    """Refuse a learned drafter that does not fit the policy, before the engine starts."""
    match config.drafter:
        case EagleDrafter(kind=kind, path=path) | ParallelDrafter(kind=kind, path=path):
            from paceline.drafters.checkpoint import preflight

            preflight(Path(path), model_path, kind=kind, max_model_len=engine.max_model_len)
        case VllmDrafter(settings={"model": model}) if not Path(str(model), "config.json").is_file():
            raise ValueError(
                f"speculation.drafter.settings.model: got {model!r}; must be a directory with a Hugging Face "
                "checkpoint because engines download nothing"
            )
        case VllmDrafter(settings={"method": "mtp", **rest}) if "model" not in rest:
            if not num_mtp_heads(model_path):
                raise ValueError(
                    f"speculation.drafter.settings.method: got 'mtp' with {model_path}; must be another method, or "
                    "settings.model the checkpoint of the heads, because this policy has no MTP heads"
                )


def num_mtp_heads(model_path: Path) -> int:
    """Return how many multi-token-prediction layers a policy's checkpoint has.

    The weights are looked for too: fine-tuned checkpoints often keep the number in config.json and lose the layers, and
    vLLM would fail to load them. Some models store them after the last regular layer, under the next number."""
    from paceline.weights.check import tensor_names

    config = json.loads((model_path / "config.json").read_text(encoding="utf-8"))
    config |= config.get("text_config", {})
    numbers = [n for key, n in config.items() if re.fullmatch(r".*(mtp|nextn).*layers", key) and isinstance(n, int)]
    num_heads = max(numbers, default=0)
    if not num_heads:
        return 0
    weights = re.compile(rf"mtp|nextn|\blayers\.{config['num_hidden_layers']}\.")
    return num_heads if any(map(weights.search, tensor_names(model_path))) else 0


def why_whole(speculative: Mapping[str, Any]) -> str | None:
    """Return why vLLM cannot shorten the drafts of its `speculative_config`, None if it can.

    For some methods its V1 runner asserts the full length, and it cuts the rows of parallel drafts by the requested
    length although they have the full one: the engine would crash at the first step. V2 has only ngram_gpu of these.
    """
    method = speculative.get("method")
    if method in ("medusa", "suffix", "ngram_gpu"):
        return f"{method} drafts are of one length in vLLM"
    if speculative.get("parallel_drafting") and method not in ("dflash", "dspark"):
        return "drafts that are made in one pass (P-EAGLE, PARD) are of one length in vLLM"
    return None


def why_fixed(*, data_parallel_size: int, executor_backend: object, world_size: int) -> str | None:
    """Return why an engine must not choose the draft length of a step, None if it may.

    Ranks that step together with a scheduler each must draft alike or deadlock, and measured times differ between them.
    vLLM reports a data-parallel size of 1 to independent ranks (dense models)."""
    if data_parallel_size > 1:
        return f"{data_parallel_size} data-parallel ranks step together, each with a scheduler of its own"
    if executor_backend == "external_launcher" and world_size > 1:
        return f"external_launcher gives each of {world_size} ranks a scheduler of its own"
    return None
