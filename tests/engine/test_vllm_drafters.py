"""Speculative methods of vLLM under our scheduler: a draft model and the policy's own MTP heads, at every push.

Heads are certified where the command is run: test_commands.py."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from contexts import one_rank
from paceline.config import EngineConfig, ObjectiveConfig, SpeculationConfig
from paceline.learner.fsdp import FsdpLearner
from paceline.orchestrator.generate import generate_all
from paceline.rollout.engine import VllmEngine
from paceline.types import GroupId, RolloutRequest
from paceline.weights.message import Push
from paceline.weights.shared_memory import ShmSender
from random_policy import END_TOKEN, make_mtp_policy, make_policy

PROMPTS = ((5, 6, 7, 8, 9), (90, 2, 33), tuple(range(10, 40)), (70,), (12, 13, 12, 13), (44, 8, 60, 61))
MAX_TOKENS = 32
DRAFT_LENGTH = 2
"""Shorter than the longest that the engine is started for: our scheduler asks for it."""


def speculation(**settings: Any) -> SpeculationConfig:
    return SpeculationConfig.model_validate(
        {
            "drafter": {"kind": "vllm", "settings": settings},
            "max_draft_length": DRAFT_LENGTH + 1,
            "selector": {"kind": "fixed", "draft_length": DRAFT_LENGTH},
        }
    )


class Speculating:
    """One engine that speculates, and the sender that feeds it."""

    def __init__(self, engine: VllmEngine, runner: asyncio.Runner) -> None:
        self.engine, self.run, self.sender = engine, runner.run, ShmSender()
        self._version = 0

    def greedy(self) -> tuple[list[list[int]], float]:
        """What it says, and the share of its drafts that was accepted."""
        prompts = [np.array(ids, np.int32) for ids in PROMPTS]
        requests = [
            RolloutRequest(group_id=GroupId(i), index=0, prompt_ids=ids, max_tokens=MAX_TOKENS, temperature=0.0)
            for i, ids in enumerate(prompts)
        ]
        rollouts = self.run(generate_all(self.engine, requests))
        drafted = sum(rollout.num_drafted for rollout in rollouts)
        assert 0 < drafted <= DRAFT_LENGTH * sum(rollout.num_verifications for rollout in rollouts)
        return [rollout.token_ids.tolist() for rollout in rollouts], sum(r.num_accepted for r in rollouts) / drafted

    def stage(self, weights: Any, target: Any = "policy") -> Push:
        self._version += 1
        return self.sender.stage(self._version, weights, target)

    def push(self, weights: Any, target: Any = "policy") -> None:
        receipt = self.run(self.engine.receive(self.stage(weights, target)))
        assert receipt.ok, receipt

    def close(self) -> None:
        self.sender.close()
        self.run(self.engine.close())


@contextmanager
def speculating(
    path: Path, config: EngineConfig, runner: asyncio.Runner, settings: dict[str, Any]
) -> Iterator[Speculating]:
    engine = runner.run(VllmEngine.start("test", path, config, seed=0, speculation=speculation(**settings)))
    found = Speculating(engine, runner)
    try:
        yield found
    finally:
        found.close()


def said_by(path: Path) -> list[list[int]]:
    """What transformers makes of the checkpoint, greedily."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    responses: list[list[int]] = []
    for prompt in PROMPTS:
        ids = list(prompt)
        while len(ids) < len(prompt) + MAX_TOKENS and (len(ids) == len(prompt) or ids[-1] != END_TOKEN):
            with torch.no_grad():
                ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        responses.append(ids[len(prompt) :])
    return responses


def stored(path: Path) -> Any:
    return load_file(path / "model.safetensors").items()


def test_draft_model_drafts_can_be_pushed_and_outlives_pushes_of_the_policy(
    policy_path: Path, engine_config: EngineConfig, runner: asyncio.Runner, tmp_path: Path
) -> None:
    """A draft model equal to the policy is always right. Lost, or overwritten by the policy's push, it would draft
    something else, and nothing but speed would tell."""
    other = make_policy(tmp_path / "other", seed=1)
    mine, theirs = said_by(policy_path), said_by(other)
    assert mine != theirs
    settings = {"method": "draft_model", "model": str(other), "draft_sample_method": "probabilistic"}
    with speculating(policy_path, engine_config, runner, settings) as speaker:
        said, share = speaker.greedy()
        assert said == mine and share < 0.5
        speaker.push(stored(policy_path), "drafter")
        said, share = speaker.greedy()
        assert said == mine and share > 0.9
        speaker.push(stored(other))
        said, share = speaker.greedy()
        assert said == theirs and share < 0.5
        speaker.push(stored(policy_path))
        said, share = speaker.greedy()
        assert said == mine and share > 0.9
        metrics = runner.run(speaker.engine.metrics())
        assert (metrics["draft/restored"], metrics["draft/restore_failures"], metrics["selector/failures"]) == (0, 0, 0)


def test_push_of_a_policy_with_heads_brings_them_and_what_they_share_with_it(
    engine_config: EngineConfig, runner: asyncio.Runner, tmp_path: Path
) -> None:
    """The heads that come are right for the policy that comes, and for no other embedding or output head: whichever of
    the three stayed behind, drafts would be wrong. The learner does not train heads, and sends them all the same."""
    wrong = make_mtp_policy(tmp_path / "wrong", step=5, noise=1.0)
    right = make_mtp_policy(tmp_path / "right", step=7)
    before, after = said_by(wrong), said_by(right)
    assert before != after
    with speculating(wrong, engine_config, runner, {"method": "mtp"}) as speaker:
        said, share = speaker.greedy()
        assert said == before and share < 0.3
        learner = FsdpLearner(right, one_rank(), ObjectiveConfig(), temperature=1.0)
        try:
            speaker.push(learner.weights(torch.float32))
        finally:
            learner.close()
        said, share = speaker.greedy()
        assert said == after and share > 0.9
        (held,) = runner.run(speaker.engine.rpc("applied_fingerprints"))
        assert (held["policy"]["version"], held["drafter"]["version"]) == (1, 1)
        refused = runner.run(speaker.engine.receive(speaker.stage(stored(right), "drafter")))
        assert not refused.lost and "pushes of the policy update it" in (refused.error or "")
        assert runner.run(speaker.engine.metrics())["draft/restored"] == 0
        speaker.push(stored(wrong))
        said, share = speaker.greedy()
        assert said == before and share < 0.3
