"""An engine that a test drives from outside its event loop, and what transformers' policy says to its rollouts."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import Qwen3ForCausalLM

from benchmarks.v2_runner import v2_runner
from paceline.config import EngineConfig, SpeculationConfig
from paceline.rollout.engine import VllmEngine
from paceline.types import Floats, GroupId, Rollout, RolloutRequest

V2_CONFIG = EngineConfig(
    dtype="float32",
    max_model_len=64,
    max_num_seqs=32,
    kv_cache_gb=0.02,
    deadline_s=1200,
)
"""float32, so that log-probabilities can be compared to many digits; deadlines for an interpreter on a busy machine."""


def started(
    path: Path,
    speculation: SpeculationConfig | None = None,
    *,
    async_scheduling: bool,
    config: EngineConfig = V2_CONFIG,
    adjust: Callable[[Any], None] | None = None,
) -> Iterator[DrivenEngine]:
    """Start an engine on V2 for as long as the iterator lives; for fixtures."""
    with asyncio.Runner() as runner:
        with v2_runner(os.environ, async_scheduling=async_scheduling):
            engine = runner.run(VllmEngine.start("v2", path, config, seed=0, speculation=speculation, adjust=adjust))
        try:
            yield DrivenEngine(engine, runner, path)
        finally:
            runner.run(engine.close())


class DrivenEngine:
    def __init__(self, engine: VllmEngine, runner: asyncio.Runner, path: Path) -> None:
        self.engine, self.run, self.path = engine, runner.run, path

    @property
    def async_scheduling(self) -> bool | None:
        """What vLLM decided, for all of its processes."""
        return self.engine._llm.vllm_config.scheduler_config.async_scheduling

    def rpc(self, method: str, *args: object) -> list:
        return self.run(self.engine.rpc(method, *args))

    def metrics(self) -> dict[str, float]:
        return dict(self.run(self.engine.metrics()))

    def sample(
        self, prompts: Sequence[Sequence[int]], *, max_tokens: int, temperature: float = 1.0, seed: int | None = None
    ) -> list[Rollout]:
        """One rollout for each prompt, in order."""

        async def rollouts() -> list[Rollout]:
            requests = [
                RolloutRequest(
                    group_id=GroupId(i),
                    index=0,
                    prompt_ids=np.array(ids, np.int32),
                    max_tokens=max_tokens,
                    temperature=temperature,
                    seed=seed,
                )
                for i, ids in enumerate(prompts)
            ]
            await self.engine.submit(requests)
            found: list[Rollout] = []
            while len(found) < len(requests):
                found.extend(await self.engine.collect())
            return sorted(found, key=lambda rollout: rollout.group_id)

        return self.run(rollouts())

    def weights(self, seed: int | None = None) -> dict[str, torch.Tensor]:
        """The policy's weights, changed at random if there is a seed."""
        stored = load_file(self.path / "model.safetensors")
        if seed is None:
            return stored
        generator = torch.Generator().manual_seed(seed)
        return {name: x * (1 + 0.3 * torch.randn(x.shape, generator=generator)) for name, x in stored.items()}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reference:
    """What transformers' policy says to a rollout."""

    logp: Floats
    """Log-probability of every response token."""
    largest: Floats
    """The largest log-probability that a token had there."""
    entropy: Floats


def reference(
    path: Path, weights: dict[str, torch.Tensor], rollouts: Sequence[Rollout], *, temperature: float = 1.0
) -> list[Reference]:
    model = Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32)
    _, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    found = []
    for rollout in rollouts:
        ids = torch.from_numpy(np.concatenate([rollout.prompt_ids, rollout.token_ids]).astype(np.int64))
        with torch.no_grad():
            logits_TV = model(ids[None]).logits[0, len(rollout.prompt_ids) - 1 : -1] / temperature
        logp_TV = torch.log_softmax(logits_TV, -1)
        found.append(
            Reference(
                logp=logp_TV.gather(-1, ids[len(rollout.prompt_ids) :, None])[:, 0].numpy(),
                largest=logp_TV.max(-1).values.numpy(),
                entropy=-(logp_TV.exp() * logp_TV).sum(-1).numpy(),
            )
        )
    return found


def furthest(rollouts: Sequence[Rollout], expected: Sequence[Reference]) -> float:
    """Largest difference between an engine's log-probabilities and the reference's."""
    return max(float(np.abs(mine.logp - theirs.logp).max()) for mine, theirs in zip(rollouts, expected, strict=True))
