"""Stock `vllm.LLM` with the settings of our engine: what `python -m benchmarks overhead` measures our layer against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from paceline.config import EngineConfig
from paceline.rollout.arguments import end_tokens, engine_args, sampling_params, set_environment
from paceline.types import RolloutRequest


class BareEngine:
    """vLLM's offline interface: all prompts in, all answers out, no streaming, no deadline."""

    def __init__(self, model_path: Path, config: EngineConfig, *, seed: int, cpus: Sequence[int] | None = None) -> None:
        set_environment(config, cpus)
        from vllm import LLM, EngineArgs

        settings = engine_args(model_path, config, seed)
        settings.worker_extension_cls = ""
        settings.weight_transfer_config = None
        settings.distributed_executor_backend = None
        self._stop_token_ids = end_tokens(model_path)
        self._llm = LLM(**{field.name: getattr(settings, field.name) for field in fields(EngineArgs)})

    def generate(self, requests: Sequence[RolloutRequest]) -> list[list[int]]:
        """Response token ids in the order of the requests."""
        from vllm import TokensPrompt

        outputs = self._llm.generate(
            [TokensPrompt(prompt_token_ids=request.prompt_ids.tolist()) for request in requests],
            [sampling_params(request, self._stop_token_ids) for request in requests],
            use_tqdm=False,
        )
        return [list(output.outputs[0].token_ids) for output in outputs]

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()
