"""New weights while rollouts run: what becomes of the KV cache that the old weights left."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3ForCausalLM

from paceline.config import EngineConfig
from paceline.rollout.engine import VllmEngine
from paceline.types import GroupId, Rollout, RolloutRequest
from paceline.weights.message import Push
from paceline.weights.shared_memory import ShmSender

PROMPT = tuple(range(10, 50))
NUM_REQUESTS = 16
Weights = dict[str, torch.Tensor]


@dataclass(slots=True)
class Run:
    engine: VllmEngine
    sender: ShmSender
    path: Path
    runner: asyncio.Runner
    version: int = 0

    def pushed_midway(self, *, recompute: bool) -> tuple[list[Rollout], Weights]:
        """Rollouts that began before a push and ended after it, and the weights that were pushed."""
        self.engine.config = self.engine.config.model_copy(update={"recompute_kv_at_sync": recompute})
        self.version += 1
        generator = torch.Generator().manual_seed(self.version)
        stored = load_file(self.path / "model.safetensors")
        weights = {name: x * (1 + 0.3 * torch.randn(x.shape, generator=generator)) for name, x in stored.items()}
        push = self.sender.stage(self.version, weights.items())
        rollouts = self.runner.run(self._generate(push, self.version))
        return [r for r in rollouts if r.policy_version < r.version_spans[-1][0] == self.version], weights

    async def _generate(self, push: Push, version: int) -> list[Rollout]:
        began = await self._num_tokens()
        await self.engine.submit([request(index, version) for index in range(NUM_REQUESTS)])
        while await self._num_tokens() < began + 2 * NUM_REQUESTS:
            await asyncio.sleep(0)
        receipt = await self.engine.receive(push)
        assert receipt.ok, receipt.error
        await self.engine.submit([request(NUM_REQUESTS, version)])
        rollouts: list[Rollout] = []
        while len(rollouts) < NUM_REQUESTS + 1:
            rollouts += await self.engine.collect()
        return rollouts

    async def _num_tokens(self) -> float:
        return (await self.engine.metrics())["engine/generated_tokens"]


def request(index: int, seed: int) -> RolloutRequest:
    prompt_ids = np.array(PROMPT, np.int32)
    return RolloutRequest(
        group_id=GroupId(seed),
        index=index,
        prompt_ids=prompt_ids,
        max_tokens=400,
        temperature=1.0,
        seed=100 * seed + index,
    )


@pytest.fixture(scope="module")
def run(policy_path: Path, runner: asyncio.Runner, one_cpu: list[int]) -> Iterator[Run]:
    config = EngineConfig(dtype="float32", max_model_len=480, max_num_seqs=NUM_REQUESTS + 1, kv_cache_gb=0.1)
    engine = runner.run(VllmEngine.start("engine-0", policy_path, config, seed=0, cpus=one_cpu))
    sender = ShmSender()
    try:
        yield Run(engine, sender, policy_path, runner)
    finally:
        sender.close()
        runner.run(engine.close())


def gaps(path: Path, weights: Weights, rollouts: list[Rollout]) -> list[float]:
    """|engine - policy| of the last token's log-probability, under the weights that were pushed."""
    model = Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.load_state_dict(weights, strict=False)
    found = []
    for rollout in rollouts:
        ids = torch.from_numpy(np.concatenate([rollout.prompt_ids, rollout.token_ids]).astype(np.int64))
        with torch.no_grad():
            logp_V = model(ids[None, :-1]).logits[0, -1].log_softmax(-1)
        found.append(abs(float(logp_V[ids[-1]]) - float(rollout.logp[-1])))
    return found


def test_recomputed_rollouts_go_on_as_the_new_policy_and_kept_ones_do_not(run: Run) -> None:
    """Either way the tokens after a push are labeled with the new version. Recomputed, their log-probabilities are the
    new policy's; kept, they are of neither policy, and the mismatch shows it."""
    crossed, weights = run.pushed_midway(recompute=True)
    assert len(crossed) >= 3, "no rollout was running when the weights came"
    recomputed = gaps(run.path, weights, crossed)
    assert max(recomputed) < 1e-3
    crossed, weights = run.pushed_midway(recompute=False)
    assert len(crossed) >= 3
    kept = gaps(run.path, weights, crossed)
    assert np.median(kept) > 0.01, "the KV cache was recomputed although the config says not to"


def test_a_rollout_that_begins_after_the_push_finds_no_prefix_of_the_old_policy(run: Run) -> None:
    """Siblings share their prompt's KV cache. With the old blocks kept for running rollouts, a new one would read the
    old policy's prompt and be wrong from its first token on."""
    for recompute in (True, False):
        run.engine.config = run.engine.config.model_copy(update={"recompute_kv_at_sync": recompute})
        run.version += 1
        generator = torch.Generator().manual_seed(run.version)
        stored = load_file(run.path / "model.safetensors")
        weights = {name: x * (1 + 0.3 * torch.randn(x.shape, generator=generator)) for name, x in stored.items()}
        push = run.sender.stage(run.version, weights.items())
        rollouts = run.runner.run(run._generate(push, run.version))
        new = [rollout for rollout in rollouts if rollout.index == NUM_REQUESTS]
        assert new[0].policy_version == run.version
        assert max(gaps(run.path, weights, new)) < 1e-3
