"""An exported drafter where Paceline is not installed: stock vLLM must serve it as the card says, and accept as
much."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, Qwen3ForCausalLM

from contexts import one_rank
from foreign_python import foreign_environment, make_foreign_python
from paceline.config import EngineConfig, FixedSelector, ObjectiveConfig, SpeculationConfig
from paceline.drafters.checkpoint import save
from paceline.drafters.export import CARD_FILE, export_drafter
from paceline.drafters.kinds import default_taps, new_drafter
from paceline.drafters.trainer import DrafterTrainer, Schedule
from paceline.learner.fsdp import FsdpLearner
from paceline.learner.hidden_states import HiddenStateTap
from paceline.rollout.engine import VllmEngine
from paceline.types import GroupId, Rollout, RolloutRequest, Sample, Tokens
from random_policy import END_TOKEN, VOCABULARY

STOCK = Path(__file__).with_name("stock.py")
DRAFT_LENGTH = 4
MAX_TOKENS = 60


def make_prompts() -> list[Tokens]:
    rng = np.random.default_rng(1)
    return [rng.integers(2, VOCABULARY, rng.integers(4, 12)).astype(np.int32) for _ in range(24)]


def answers(policy_path: Path) -> list[Sample]:
    """What the policy says to the prompts at temperature 0."""
    model: Any = Qwen3ForCausalLM.from_pretrained(policy_path, dtype=torch.float32).eval()
    samples = []
    for prompt in make_prompts():
        ids_1T = torch.from_numpy(prompt).long()[None]
        ids = model.generate(
            ids_1T, attention_mask=torch.ones_like(ids_1T), do_sample=False, max_new_tokens=MAX_TOKENS
        )[0]
        logp = np.zeros(len(ids) - len(prompt), np.float32)
        token_ids = ids.numpy().astype(np.int32)
        samples.append(Sample(token_ids=token_ids, num_prompt_tokens=len(prompt), logp=logp, advantage=0.0))
    return samples


@pytest.fixture(scope="module")
def exported(policy_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter that knows these very answers by heart: one that hits hardly ever would hide a difference."""
    directory = tmp_path_factory.mktemp("export")
    learner = FsdpLearner(policy_path, one_rank(), ObjectiveConfig(), temperature=1.0)
    try:
        policy = AutoConfig.from_pretrained(policy_path)
        taps = default_taps(policy.num_hidden_layers)
        documents = HiddenStateTap(learner, taps).all_documents(answers(policy_path))
        embedding_VD, head_VD = learner.embedding_and_head()
    finally:
        learner.close()
    drafter = new_drafter(
        "eagle3",
        policy,
        taps=taps,
        policy_path=policy_path,
        embedding_VD=embedding_VD,
        head_VD=head_VD,
        tap_scale_K=np.sqrt(
            np.mean(np.concatenate([document.taps for document in documents]) ** 2, axis=(0, 2))
        ).tolist(),
        seed=0,
        draft_length=DRAFT_LENGTH,
    )
    trainer = DrafterTrainer(drafter, head_VD, Schedule(num_steps=60, draft_length=DRAFT_LENGTH, autocast=False))
    while trainer.num_steps < 60:
        trainer.submit(documents)
        trainer.run(lambda: False)
    save(drafter, directory / "drafter")
    export_drafter(directory / "drafter", directory / "out")
    return directory / "out"


@pytest.fixture(scope="module")
def foreign_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_foreign_python(tmp_path_factory.mktemp("foreign"))


async def inside_paceline(
    policy: Path, drafter: Path, config: EngineConfig, prompts: Sequence[Tokens]
) -> list[Rollout]:
    speculation = SpeculationConfig.model_validate(
        {
            "drafter": {"kind": "eagle3", "path": str(drafter)},
            "max_draft_length": DRAFT_LENGTH,
            "selector": FixedSelector(draft_length=DRAFT_LENGTH),
        }
    )
    engine = await VllmEngine.start("test", policy, config, seed=0, speculation=speculation)
    try:
        await engine.submit(
            [
                RolloutRequest(group_id=GroupId(i), index=0, prompt_ids=ids, max_tokens=MAX_TOKENS, temperature=0.0)
                for i, ids in enumerate(prompts)
            ]
        )
        rollouts: list[Rollout] = []
        while len(rollouts) < len(prompts):
            rollouts += await engine.collect()
        return sorted(rollouts, key=lambda rollout: rollout.group_id)
    finally:
        await engine.close()


def test_the_other_environment_has_everything_but_paceline(foreign_python: Path, tmp_path: Path) -> None:
    """If it found Paceline after all, the next test would prove nothing."""
    look = "from importlib.util import find_spec as f; print(f('vllm') is not None, f('paceline') is not None)"
    found = {
        python: subprocess.run(
            [python, "-c", look], env=foreign_environment(), cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout
        for python in (str(foreign_python), sys.executable)
    }
    assert found[str(foreign_python)].split() == ["True", "False"]
    assert found[sys.executable].split() == ["True", "True"]


def test_stock_vllm_serves_it_as_the_card_says_and_accepts_as_much(
    policy_path: Path,
    exported: Path,
    foreign_python: Path,
    engine_config: EngineConfig,
    runner: asyncio.Runner,
    tmp_path: Path,
) -> None:
    """A drafter that needs us for its acceptance would be worth nothing to those who get it."""
    prompts = make_prompts()
    rollouts = runner.run(inside_paceline(policy_path, exported, engine_config, prompts))
    ours = 1 + sum(rollout.num_accepted for rollout in rollouts) / sum(
        rollout.num_verifications for rollout in rollouts
    )

    card = (exported / CARD_FILE).read_text()
    command = re.search(r"vllm serve POLICY --host 127.0.0.1 --speculative-config '(.*)'", card)
    assert command, "the card does not say how to serve it"
    order = {
        "policy": str(policy_path),
        "speculative_config": json.loads(command[1]) | {"model": str(exported)},
        "prompts": [ids.tolist() for ids in prompts],
        "max_tokens": MAX_TOKENS,
        "stop_token_ids": [END_TOKEN],
    }
    done = subprocess.run(
        [str(foreign_python), str(STOCK), json.dumps(order)],
        env=foreign_environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    theirs = 1 + answer["num_accepted"] / answer["num_verifications"]

    print(f"accepted length: {ours:.3f} inside Paceline, {theirs:.3f} in stock vLLM")
    assert [rollout.token_ids.tolist() for rollout in rollouts] == answer["token_ids"]
    assert ours > 1.5
    assert theirs == pytest.approx(ours, rel=0.02)
