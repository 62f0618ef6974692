"""Settings that are refused on GPUs because they are known to fail there."""

from __future__ import annotations

from paceline.config.rollout import EngineConfig
from paceline.config.root import Config

_WEIGHTS = (
    "DeepGEMM, vLLM's FP8 kernel on Hopper, re-quantizes weights to UE8M0 scales, so the fingerprint of every layer "
    "would differ from the learner's reference and every engine would be lost"
)
_KV_CACHE = "FlashInfer caches the KV scales at the first step and would ignore the calibrated scales of later pushes"
_TRAINING = (
    "the trainer needs GPU memory beside an engine that holds rollout.engine.gpu_memory_utilization of it, and a "
    "stopped trainer frees none"
)


def refuse_fp8_on_gpu(engine: EngineConfig) -> None:
    """Raise ValueError if an engine on a GPU should use FP8."""
    for key, value, reason in (("weights", engine.weights, _WEIGHTS), ("kv_cache", engine.kv_cache, _KV_CACHE)):
        if value == "fp8":
            raise ValueError(f"rollout.engine.{key}: got 'fp8' on a GPU; must be 'full' because {reason}")


def refuse_on_gpu(config: Config) -> None:
    """Raise ValueError if a run on GPUs should use FP8 or train its drafter."""
    refuse_fp8_on_gpu(config.rollout.engine)
    if config.speculation is not None and config.speculation.training.mode != "off":
        raise ValueError(
            f"speculation.training.mode: got {config.speculation.training.mode!r} on GPUs; must be 'off' because "
            f"{_TRAINING}; `paceline draft train` trains a drafter before the run"
        )
