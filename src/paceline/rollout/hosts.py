"""Engine arguments that the variable PACELINE fills in for a host, with reasons. Does not need vLLM.

    fill({"model": "Qwen/Qwen3-8B", "max_model_len": 8192}, "speculation.toml").arguments
        {"speculative_config": ..., "scheduler_cls": ..., "additional_config": {"paceline": ...}}

`plugin.py` sets them in an engine, `paceline explain` prints them. The host's own arguments are never changed. Settings
with an error are left out, because they would stop the host's engine later.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

from paceline.config import EngineConfig, HistoryDrafter, LearnedDrafter, SpeculationConfig, VllmDrafter, load_config
from paceline.rollout.speculation import (
    KEEP_LAST_BLOCK,
    SCHEDULER,
    check_drafter,
    graph_plan,
    num_mtp_heads,
    scheduler_settings,
    speculative_config,
    why_fixed,
    why_whole,
)
from paceline.selector.select import build_selector

VARIABLE = "PACELINE"
AUTO = "auto"
"""Setting that enables the MTP heads of the policy's checkpoint, if it has any."""
_MTP_LENGTH = 3
"""Longest draft from MTP heads. A head is trained for one position; each reuse lowers acceptance."""
_MAX_NUM_SEQS = 256
"""Planned batch size if the host leaves `max_num_seqs` to vLLM."""
_SPECULATION = ("speculative_config", "spec_method", "spec_model", "spec_tokens")
_GRAPHS = ("cudagraph_capture_sizes", "compilation_config")
_HISTORY_NEEDS = ("numba", "xxhash")
_RANKS = ("tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size", "data_parallel_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class Filling:
    """Engine arguments to set, by name, and the reasons."""

    arguments: dict[str, Any]
    reasons: tuple[str, ...]
    refused: bool = False
    """Whether an error prevents filling in anything."""

    def line(self, setting: str) -> str:
        """Format names and reasons as one log line."""
        reasons = "; ".join(self.reasons).replace("\n", "; ")
        return f"{VARIABLE}={setting} fills in {', '.join(self.arguments) or 'nothing'}: {reasons}"


def given(arguments: Any) -> dict[str, Any]:
    """Return the arguments set by the host: the model, and values other than the default."""
    default = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(arguments)}
    values = {name: getattr(arguments, name) for name in default}
    return {name: value for name, value in values.items() if name == "model" or value != default[name]}


def fill(
    given: Mapping[str, Any],
    setting: str,
    *,
    on_gpu: bool = False,
    sound_sampler: bool = True,
    drafter_loads_apart: bool = True,
    last_block_stays: bool = True,
) -> Filling:
    """Return what a setting (AUTO or a TOML file with a section [speculation]) adds to the host's arguments.

    Without a `sound_sampler`, add no speculation: it would sample from a wrong distribution. Unless
    `drafter_loads_apart`, add no learned drafter to a policy with dummy weights. `last_block_stays` means that vLLM
    has KEEP_LAST_BLOCK.
    """
    if reason := _why_nothing(given):
        return Filling(arguments={}, reasons=(reason,))
    try:
        speculates = any(name in given for name in _SPECULATION)
        if setting == AUTO:
            if speculates:
                return Filling(arguments={}, reasons=("the host's own speculation stays",))
            if not (num_heads := num_mtp_heads(_policy(given))):
                return Filling(arguments={}, reasons=("the policy's checkpoint has no MTP heads",))
            speculation, engine = _with_mtp_heads(num_heads), EngineConfig()
        else:
            speculation, engine = _read(setting, given)
        if speculates:
            return _beside_speculation(given, speculation)
        if not sound_sampler:
            raise ValueError(
                "vLLM's sampler is wrong under speculation, and the plugin paceline_sampler did not fix it"
            )
        fixed = _why_fixed(given)
        if fixed and setting == AUTO:
            raise ValueError(f"MTP heads may cost more than they gain if the draft length is not chosen: {fixed}")
        has_weights = isinstance(speculation.drafter, LearnedDrafter | VllmDrafter)
        dummy = has_weights and given.get("load_format") == "dummy"
        if dummy and not drafter_loads_apart:
            raise ValueError(
                "load_format: got dummy; must be another because the V2 model runner of vLLM before 0.30 would make "
                "the drafter a dummy too; VLLM_USE_V2_MODEL_RUNNER=0 selects V1"
            )
        engine = engine.model_copy(update={"max_num_seqs": given.get("max_num_seqs", _MAX_NUM_SEQS)})
        filling = _with_speculation(given, speculation, engine, on_gpu=on_gpu, fixed=fixed)
        if not last_block_stays:
            filling.arguments["speculative_config"].pop(KEEP_LAST_BLOCK, None)
        return filling
    except Exception as error:  # noqa: BLE001  the host's engine must start
        return Filling(arguments={}, reasons=(str(error) or repr(error),), refused=True)


def _read(file: str, given: Mapping[str, Any]) -> tuple[SpeculationConfig, EngineConfig]:
    config = load_config(file, [f"policy.model={json.dumps(given.get('model', ''))}"])  # the host's
    if config.speculation is None:
        raise ValueError(f"speculation: is missing; must be a section of {file} because it names the drafter")
    return config.speculation, config.rollout.engine


def _with_mtp_heads(num_heads: int) -> SpeculationConfig:
    """Draft with the policy's own heads. vLLM refuses lengths beyond `num_heads` that are not its multiples."""
    longest = _MTP_LENGTH - _MTP_LENGTH % min(num_heads, _MTP_LENGTH)
    drafter = VllmDrafter(settings={"method": "mtp", "draft_sample_method": "probabilistic"})
    return SpeculationConfig(drafter=drafter, max_draft_length=longest)


def _why_nothing(given: Mapping[str, Any]) -> str | None:
    if given.get("scheduler_cls", SCHEDULER) != SCHEDULER:
        return f"the host has its own scheduler, {given['scheduler_cls']}"
    if given.get("runner", "generate") != "generate" or "convert" in given:
        return "the engine does not generate"
    if not isinstance(given.get("additional_config", {}), dict):
        return "additional_config is no dict"
    return None


def _why_fixed(given: Mapping[str, Any]) -> str | None:
    return why_fixed(
        data_parallel_size=given.get("data_parallel_size", 1),
        executor_backend=given.get("distributed_executor_backend"),
        world_size=prod(given.get(name, 1) for name in _RANKS),
    )


def _beside_speculation(given: Mapping[str, Any], speculation: SpeculationConfig) -> Filling:
    """Add the scheduler to an engine with the host's speculation."""
    host = given.get("speculative_config") or {}
    longest = host.get("num_speculative_tokens") or given.get("spec_tokens") or 1
    build_selector(speculation.selector, max_draft_length=longest, max_num_requests=1)  # raise here, not in the engine
    reasons = ["the host's own speculation stays"]
    if host.get("enable_adaptive_verification"):
        reasons.append("vLLM's adaptive verification stays on and trims drafts")
    settings = {"selector": speculation.selector.model_dump(mode="json")}
    return _filling(given, {}, settings, [*reasons, _chooser(speculation, _why_fixed(given) or why_whole(host))])


def _with_speculation(
    given: Mapping[str, Any], speculation: SpeculationConfig, engine: EngineConfig, *, on_gpu: bool, fixed: str | None
) -> Filling:
    """Add drafter, scheduler and, on a GPU, CUDA graphs for its draft lengths."""
    drafter, longest = speculation.drafter, speculation.max_draft_length
    _check(given, speculation, engine)
    plan = graph_plan(speculation, engine) if on_gpu and not given.get("enforce_eager") else None
    vllm = speculative_config(speculation, engine, plan)
    arguments: dict[str, Any] = {"speculative_config": vllm}
    chooser = _chooser(speculation, fixed or why_whole(vllm))
    reasons = [f"drafter {drafter.kind}, up to {longest} tokens", chooser]
    if fixed:
        vllm.pop("num_speculative_tokens_per_batch_size", None)  # vLLM would draft by it
    elif plan is not None and not any(name in given for name in _GRAPHS):
        arguments["cudagraph_capture_sizes"] = plan.capture_sizes
    if isinstance(drafter, LearnedDrafter | VllmDrafter) and given.get("load_format") == "dummy":
        vllm.setdefault("draft_load_config", {"load_format": "auto"})
        reasons.append("the drafter loads its checkpoint, although the policy has dummy weights")
    if speculation.training.mode != "off":
        reasons.append("speculation.training has no effect in other hosts")
    return _filling(given, arguments, scheduler_settings(speculation, plan), reasons)


def _chooser(speculation: SpeculationConfig, fixed: str | None) -> str:
    return f"vLLM keeps its draft length, because {fixed}" if fixed else f"selector {speculation.selector.kind}"


def _filling(
    given: Mapping[str, Any], arguments: dict[str, Any], settings: dict[str, Any], reasons: list[str]
) -> Filling:
    """Add scheduler and settings, except those of the host."""
    host = given.get("additional_config", {})
    if "scheduler_cls" not in given:
        arguments["scheduler_cls"] = SCHEDULER
    if (own := settings | host.get("paceline", {})) != host.get("paceline"):
        arguments["additional_config"] = host | {"paceline": own}
    return Filling(arguments=arguments, reasons=tuple(reasons) if arguments else ("everything is set already",))


def _check(given: Mapping[str, Any], speculation: SpeculationConfig, engine: EngineConfig) -> None:
    """Raise errors that would otherwise stop the engine, or make drafts useless."""
    build_selector(
        speculation.selector, max_draft_length=speculation.max_draft_length, max_num_requests=engine.max_num_seqs
    )
    # Not imported: numba breaks vLLM's CPU worker, which may start in this process (sampler_fix.py).
    missing = [name for name in _HISTORY_NEEDS if find_spec(name) is None]
    if isinstance(speculation.drafter, HistoryDrafter) and missing:
        raise ValueError(f"drafter history needs {' and '.join(missing)}: pip install 'paceline[train]'")
    if isinstance(speculation.drafter, LearnedDrafter):
        from paceline.drafters.checkpoint import policy_config

        policy = _policy(given)
        length = given.get("max_model_len") or 0
        if length <= 0:  # vLLM's default: the policy's maximum
            length = policy_config(policy)["max_position_embeddings"]
        check_drafter(speculation, policy, engine.model_copy(update={"max_model_len": length}))


def _policy(given: Mapping[str, Any]) -> Path:
    """Return a directory with the policy's config, tokenizer and weight index, downloaded from the hub if needed."""
    if "model" not in given:
        raise ValueError("model: is missing; must be given because a drafter belongs to one policy")
    if (path := Path(given["model"])).is_dir():
        return path
    from huggingface_hub import snapshot_download

    files = ["config.json", "tokenizer.json", "model.safetensors.index.json"]
    return Path(snapshot_download(given["model"], revision=given.get("revision"), allow_patterns=files))
