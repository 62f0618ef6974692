"""An exported drafter where Paceline is not installed: stock vLLM must serve it as the card says, and accept as much."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from paceline.config import EngineConfig, FixedSelector, SpeculationConfig
from paceline.draft.export import CARD_FILE, export_drafter
from paceline.rollout.engine import VllmEngine
from paceline.run.warmstart import WarmStart, train_drafter
from paceline.types import Prompt, Rollout, RolloutRequest, Tokens
from random_policy import END_TOKEN, VOCABULARY

STOCK = Path(__file__).with_name("stock.py")
DRAFT_LENGTH = 4
MAX_TOKENS = 60


def make_prompts(num: int, *, seed: int) -> list[Prompt]:
    rng = np.random.default_rng(seed)
    ids = [rng.integers(2, VOCABULARY, rng.integers(4, 12)).astype(np.int32) for _ in range(num)]
    return [Prompt(id=str(i), text="", token_ids=token_ids, row={}) for i, token_ids in enumerate(ids)]


@pytest.fixture(scope="module")
def exported(policy_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("export")
    recipe = WarmStart(
        train_tokens=20_000, rollout_tokens=6_000, heldout_tokens=1_000, max_tokens=60, max_num_seqs=64, draft_length=DRAFT_LENGTH
    )
    prompts = iter(make_prompts(4_000, seed=0))
    train_drafter("eagle3", policy_path, prompts, directory / "drafter", recipe, data="random tokens", progress=print)
    export_drafter(directory / "drafter", directory / "out")
    return directory / "out"


@pytest.fixture(scope="module")
def foreign_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with everything that is installed here, but Paceline."""
    directory = tmp_path_factory.mktemp("foreign")
    venv.create(directory)
    target = next(directory.glob("lib/python*/site-packages"))
    for folder in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in Path(folder).iterdir():
            if "paceline" not in entry.name.lower() and not (target / entry.name).exists():
                (target / entry.name).symlink_to(entry)
    return directory / "bin" / "python"


def environment() -> dict[str, str]:
    """Ours without what leads to Paceline, and without what our engines have set for vLLM."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VLLM_", "VIRTUAL_ENV"))}
    return kept | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}


async def inside_paceline(policy: Path, drafter: Path, config: EngineConfig, prompts: Sequence[Tokens]) -> list[Rollout]:
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
                RolloutRequest(group_id=i, index=0, prompt_ids=ids, max_tokens=MAX_TOKENS, temperature=0.0)
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
            [python, "-c", look], env=environment(), cwd=tmp_path, capture_output=True, text=True, check=True
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
    prompts = [prompt.token_ids for prompt in make_prompts(24, seed=1)]
    rollouts = runner.run(inside_paceline(policy_path, exported, engine_config, prompts))
    ours = 1 + sum(rollout.num_accepted for rollout in rollouts) / sum(rollout.num_verifications for rollout in rollouts)

    command = re.search(r"vllm serve POLICY --speculative-config '(.*)'", (exported / CARD_FILE).read_text())
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
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    theirs = 1 + answer["num_accepted"] / answer["num_verifications"]

    print(f"accepted length: {ours:.3f} inside Paceline, {theirs:.3f} in stock vLLM")
    assert [rollout.token_ids.tolist() for rollout in rollouts] == answer["token_ids"]
    assert ours > 1.2, "a drafter that never hits would hide a difference"
    assert theirs == pytest.approx(ours, rel=0.02)
