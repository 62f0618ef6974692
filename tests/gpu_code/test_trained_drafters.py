"""The shipped drafters on V2: one that guesses well shows what a random one cannot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from benchmarks.workload import random_drafter
from driven_engine import V2_CONFIG, DrivenEngine, reference, started
from paceline import assets
from paceline.arena.task import problems
from paceline.config import SpeculationConfig
from paceline.drafters.rounds import drafter_weights
from paceline.types import Rollout
from paceline.weights.shared_memory import ShmSender

DRAFT_LENGTH = 3
MAX_TOKENS = 16


def prompts(num: int) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(assets.policy("tiny"))
    short = (problem for problem in problems(0) if 4 <= len(problem.terms) <= 8)
    return [tokenizer(problem.prompt)["input_ids"] for problem in islice(short, num)]


def accepted_length(rollouts: Sequence[Rollout]) -> float:
    return 1 + sum(r.num_accepted for r in rollouts) / sum(r.num_verifications for r in rollouts)


@pytest.fixture(scope="module", params=assets.DRAFTERS)
def drafting(request: pytest.FixtureRequest) -> Iterator[tuple[str, DrivenEngine]]:
    speculation = SpeculationConfig.model_validate(
        {
            "drafter": {"kind": request.param, "path": str(assets.drafter("tiny", request.param))},
            "max_draft_length": DRAFT_LENGTH,
            "selector": {"kind": "fixed", "draft_length": DRAFT_LENGTH},
        }
    )

    def plant(args: Any) -> None:
        args.worker_extension_cls = "wiping_worker.WipingWorker"

    for engine in started(assets.policy("tiny"), speculation, async_scheduling=True, config=V2_CONFIG, adjust=plant):
        yield request.param, engine


def test_trained_drafter_is_accepted_and_greedy_rollouts_are_the_policys_argmax(
    drafting: tuple[str, DrivenEngine],
) -> None:
    """Hidden states or positions handed to the drafter one off would cost most of what it guesses, and no error."""
    _, engine = drafting
    rollouts = engine.sample(prompts(8), max_tokens=MAX_TOKENS, temperature=0.0)
    for expected in reference(engine.path, engine.weights(), rollouts):
        assert (expected.largest - expected.logp).max() < 1e-4
    assert accepted_length(rollouts) > 2


def test_pushed_drafter_drafts(drafting: tuple[str, DrivenEngine], tmp_path: Path) -> None:
    """Weights that arrive in a copy that nobody reads leave the old drafter at work: a random one must guess badly, and
    the trained one, pushed again, as well as before."""
    kind, engine = drafting
    trained = assets.drafter("tiny", kind)
    random_drafter(trained, tmp_path / "random", seed=3)
    lengths = [accepted_length(engine.sample(prompts(8), max_tokens=MAX_TOKENS, temperature=0.0))]
    sender = ShmSender()
    try:
        for version, path in enumerate((tmp_path / "random", trained), start=1):
            weights = drafter_weights(path / "model.safetensors")
            receipt = engine.run(engine.engine.receive(sender.stage(version, weights.items(), target="drafter")))
            assert receipt.ok == (kind == "eagle3"), receipt
            lengths.append(accepted_length(engine.sample(prompts(8), max_tokens=MAX_TOKENS, temperature=0.0)))
    finally:
        sender.close()
    loaded, random, pushed = lengths
    if kind == "dflash":  # refused on a CPU: vLLM packs its weights, `reload.reload_problem` says why
        assert random == loaded
    else:
        assert random - 1 < 0.3 * (loaded - 1)
    assert pushed == pytest.approx(loaded, rel=0.05)


def test_drafter_survives_a_reload_and_a_sleep_that_wipe_it(drafting: tuple[str, DrivenEngine]) -> None:
    """As tests/engine/test_drafters.py has it for V1, whose runner finds its drafter elsewhere."""
    _, engine = drafting
    before, restored = engine.rpc("drafter_fingerprints"), engine.metrics()["draft/restored"]
    for method in ("reload_weights", "wake_up"):
        engine.rpc("lose_drafter_in", method)
    for calls in ([("reload_weights",)], [("sleep", 2), ("wake_up",)]):
        for call in calls:
            engine.rpc(*call)
        assert engine.rpc("drafter_fingerprints") == before
        restored += 1
        assert engine.metrics()["draft/restored"] == restored
    assert engine.metrics()["draft/restore_failures"] == 0
    assert accepted_length(engine.sample(prompts(8), max_tokens=MAX_TOKENS, temperature=0.0)) > 2
