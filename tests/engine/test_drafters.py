"""The shipped drafters on a real engine, and a warm start that makes a new one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.workload import random_drafter
from paceline import assets
from paceline.arena.task import problems
from paceline.config import EngineConfig, FixedSelector, SpeculationConfig
from paceline.drafters.checkpoint import load, with_own_embeddings
from paceline.drafters.kinds import default_taps, guess
from paceline.drafters.packing import Document, make_pack
from paceline.drafters.rounds import drafter_weights
from paceline.rollout.engine import VllmEngine
from paceline.rollout.internals.platform import has_amx
from paceline.types import GroupId, RolloutRequest, Tokens
from paceline.weights.shared_memory import ShmSender
from random_policy import make_drafter

DRAFT_LENGTH = 4
MAX_TOKENS = 40
# What comes after the end decides over drafts that reach beyond it.
BEYOND = MAX_TOKENS + DRAFT_LENGTH + 2


BLOCK = 32
"""Tokens of a block in the cache. vLLM computes the last matched one anew for EAGLE."""
FEWEST_TERMS = 12
"""Problems of so many terms have answers longer than BEYOND."""


def make_prompts(num: int, *, seed: int) -> list[Tokens]:
    tokenizer = AutoTokenizer.from_pretrained(assets.policy("tiny"))
    long = (problem for problem in problems(seed) if FEWEST_TERMS <= len(problem.terms) < 2 * FEWEST_TERMS)
    return [np.array(tokenizer(problem.prompt)["input_ids"], np.int32) for problem in islice(long, num)]


@pytest.fixture(scope="module", params=assets.DRAFTERS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def policy_path() -> Path:
    """A trained policy, so that drafts are accepted often."""
    return assets.policy("tiny")


@pytest.fixture(scope="module")
def drafter_path(kind: str) -> Path:
    return assets.drafter("tiny", kind)


async def generate(
    policy_path: Path,
    config: EngineConfig,
    prompts: Sequence[Tokens],
    max_tokens: int,
    speculation: SpeculationConfig | None,
) -> tuple[list[Tokens], dict[str, float]]:
    engine = await VllmEngine.start("test", policy_path, config, seed=0, speculation=speculation)
    try:
        return await greedy(engine, prompts, max_tokens), dict(await engine.metrics())
    finally:
        await engine.close()


async def greedy(engine: VllmEngine, prompts: Sequence[Tokens], max_tokens: int) -> list[Tokens]:
    requests = [
        RolloutRequest(group_id=GroupId(i), index=0, prompt_ids=ids, max_tokens=max_tokens, temperature=0.0)
        for i, ids in enumerate(prompts)
    ]
    await engine.submit(requests)
    rollouts = []
    while len(rollouts) < len(prompts):
        rollouts += await engine.collect()
    return [r.token_ids for r in sorted(rollouts, key=lambda r: r.group_id)]


def drafted(drafter_path: Path, policy_path: Path, token_ids: Tokens, num_prompt: int) -> list[list[int]]:
    """By anchor, what the unrolled drafter would put forward if everything before was accepted."""
    model = AutoModelForCausalLM.from_pretrained(policy_path, dtype=torch.float32).eval()
    taps = default_taps(model.config.num_hidden_layers)
    outputs: dict[int, torch.Tensor] = {}
    for tap in taps:
        module = model.model.layers[tap - 1] if tap else model.model.embed_tokens
        module.register_forward_hook(
            lambda _module, _inputs, output, tap=tap: outputs.update({tap: output[0].detach()})
        )
    with torch.no_grad():
        last = model.model(input_ids=torch.from_numpy(token_ids).long()[None], use_cache=False).last_hidden_state[0]
    document = Document(
        token_ids=token_ids,
        num_prompt_tokens=num_prompt,
        taps=torch.stack([outputs[tap] for tap in taps], 1).numpy(),
        last=last.numpy(),
    )
    drafter = load(drafter_path)
    logits: list[torch.Tensor] = []
    drafter.lm_head.register_forward_hook(lambda _module, _inputs, output: logits.append(output.detach()))
    with torch.no_grad():
        guess(drafter, make_pack([document], torch.device("cpu")), model.lm_head.weight.detach(), DRAFT_LENGTH)
    return torch.stack([step.argmax(-1) for step in logits], 1).tolist()


def replay(guesses: list[list[int]], response: Sequence[int]) -> tuple[int, int]:
    """Verifications and accepted tokens of an engine that writes this response."""
    verifications = accepted = anchor = 0
    while anchor + 1 < MAX_TOKENS:  # the prefill gives the first token
        run = 0
        while run < DRAFT_LENGTH and guesses[anchor][run] == response[anchor + 1 + run]:
            run += 1
        verifications, accepted, anchor = verifications + 1, accepted + run, anchor + run + 1
    return verifications, accepted


def test_the_engine_drafts_what_training_unrolled_and_writes_what_it_writes_without(
    kind: str, policy_path: Path, drafter_path: Path, engine_config: EngineConfig, runner: asyncio.Runner
) -> None:
    """Positions, hidden states or tokens that differ by one from vLLM's would train a drafter for an engine that does
    not exist: the count of accepted drafts would differ, while the output stays right."""
    prompts = make_prompts(16, seed=1)
    plain, _ = runner.run(generate(policy_path, engine_config, prompts, BEYOND, None))
    endless = [(prompt, ids) for prompt, ids in zip(prompts, plain, strict=True) if len(ids) == BEYOND]
    assert len(endless) >= 8
    # Drafts shorter than those that the engine was started for, as a selector asks for.
    speculation = SpeculationConfig.model_validate(
        {
            "drafter": {"kind": kind, "path": str(drafter_path)},
            "max_draft_length": DRAFT_LENGTH + 2,
            "selector": FixedSelector(draft_length=DRAFT_LENGTH),
        }
    )
    written, metrics = runner.run(
        generate(policy_path, engine_config, [ids for ids, _ in endless], MAX_TOKENS, speculation)
    )
    for ids, (_, expected) in zip(written, endless, strict=True):
        assert ids.tolist() == expected[:MAX_TOKENS].tolist()
    verifications = accepted = 0
    for prompt, response in endless:
        guesses = drafted(drafter_path, policy_path, np.concatenate([prompt, response]), len(prompt))
        counts = replay(guesses, response.tolist())
        verifications, accepted = verifications + counts[0], accepted + counts[1]
    assert accepted > verifications, "a drafter that seldom hits would hide a difference"
    assert metrics["engine/drafted_tokens"] == pytest.approx(verifications * DRAFT_LENGTH, rel=0.02)
    assert metrics["engine/accepted_tokens"] == pytest.approx(accepted, rel=0.05, abs=3)


NEEDS_AMX = pytest.mark.skipif(not has_amx(), reason="vLLM's FP8 kernels for CPUs need AMX")


@pytest.mark.parametrize("weights", ["full", pytest.param("fp8", marks=NEEDS_AMX)])
def test_a_pushed_drafter_drafts_as_it_would_have_been_loaded(
    kind: str,
    weights: str,
    policy_path: Path,
    drafter_path: Path,
    engine_config: EngineConfig,
    runner: asyncio.Runner,
    tmp_path: Path,
) -> None:
    """Weights that arrive under another name, or into a copy that nobody reads, leave the old drafter at work without a
    word; so do cached prefixes, which hold its keys."""
    config = engine_config if weights == "full" else engine_config.model_copy(update={"dtype": "bfloat16"})
    random_drafter(drafter_path, tmp_path / "random", seed=3)
    prompts = make_prompts(16, seed=2)
    speculation = SpeculationConfig.model_validate(
        {
            "drafter": {"kind": kind, "path": str(drafter_path), "weights": weights},
            "max_draft_length": DRAFT_LENGTH,
            "selector": FixedSelector(draft_length=DRAFT_LENGTH),
        }
    )

    async def loaded_random_pushed() -> list[float]:
        """A push that is refused leaves the share as it was."""
        engine = await VllmEngine.start("test", policy_path, config, seed=0, speculation=speculation)
        sender = ShmSender()
        try:
            shares = [await accepted_share(engine, prompts)]
            await prefix_hits(engine)
            # All but the block with the token that vLLM always computes: siblings would compute one block more.
            assert await prefix_hits(engine) == 3 * BLOCK
            for version, path in enumerate((tmp_path / "random", drafter_path), start=1):
                drafter = drafter_weights(path / "model.safetensors")
                receipt = await engine.receive(sender.stage(version, drafter.items(), target="drafter"))
                assert receipt.ok == (kind == "eagle3") and not receipt.lost, receipt
                assert await prefix_hits(engine) == 0, "a new drafter must not read keys of the old one"
                shares.append(await accepted_share(engine, prompts))
            assert engine.policy_version == 0, "a drafter is no policy"
            return shares
        finally:
            sender.close()
            await engine.close()

    loaded, random, pushed = runner.run(loaded_random_pushed())
    if kind == "dflash":  # which vLLM's CPU backend cannot reload: see `backends._cannot_reload_drafter`
        assert random == pytest.approx(loaded, rel=0.02)
    else:
        assert random < 0.5 * loaded
    assert pushed == pytest.approx(loaded, rel=0.02)


@pytest.mark.parametrize("own_ends", [False, True])
def test_a_pushed_drafter_leaves_the_policy_alone(
    own_ends: bool, policy_path: Path, engine_config: EngineConfig, runner: asyncio.Runner, tmp_path: Path
) -> None:
    """vLLM shares embedding and head that are equal when it loads both: a drafter's new ones would land in the
    policy."""
    checkpoint = make_drafter(policy_path, tmp_path / "equal")
    if own_ends:
        checkpoint = with_own_embeddings(checkpoint, tmp_path / "own", model_path=policy_path, dtype=torch.float32)
    random_drafter(checkpoint, tmp_path / "random", seed=3)
    prompts = make_prompts(8, seed=2)
    speculation = SpeculationConfig.model_validate(
        {"drafter": {"kind": "eagle3", "path": str(checkpoint)}, "max_draft_length": 3}
    )

    async def before_and_after_push() -> tuple[list[Tokens], list[Tokens], bool, str | None]:
        engine = await VllmEngine.start("test", policy_path, engine_config, seed=0, speculation=speculation)
        sender = ShmSender()
        try:
            before = await greedy(engine, prompts, MAX_TOKENS)
            weights = drafter_weights(tmp_path / "random" / "model.safetensors")
            receipt = await engine.receive(sender.stage(1, weights.items(), target="drafter"))
            return before, await greedy(engine, prompts, MAX_TOKENS), receipt.ok, receipt.error
        finally:
            sender.close()
            await engine.close()

    before, after, ok, error = runner.run(before_and_after_push())
    assert [ids.tolist() for ids in after] == [ids.tolist() for ids in before]
    assert ok == own_ends
    assert ok or "embed_tokens" in (error or ""), error


def test_drafter_survives_a_reload_and_a_sleep_that_wipe_it(
    policy_path: Path, engine_config: EngineConfig, runner: asyncio.Runner, tmp_path: Path
) -> None:
    """Nothing fails when a drafter's weights are lost: drafts are rejected, and the engine is slow for ever. The CPU's
    sleep does nothing, so the loss is planted in it."""
    drafter_path = assets.drafter("tiny", "eagle3")
    random_drafter(drafter_path, tmp_path / "random", seed=3)
    speculation = SpeculationConfig.model_validate(
        {
            "drafter": {"kind": "eagle3", "path": str(drafter_path)},
            "max_draft_length": DRAFT_LENGTH,
            "selector": FixedSelector(draft_length=DRAFT_LENGTH),
        }
    )

    def plant(args: Any) -> None:
        args.worker_extension_cls = "wiping_worker.WipingWorker"

    async def scenario() -> None:
        engine = await VllmEngine.start(
            "test", policy_path, engine_config, seed=0, speculation=speculation, adjust=plant
        )
        sender = ShmSender()

        async def wiped(num_restored: int) -> None:
            """Wipe the drafter in both ways, and find it whole and counted."""
            before = await engine.rpc("drafter_fingerprints")
            assert len(before[0]) > 1
            for calls in ([("reload_weights",)], [("sleep", 2), ("wake_up",)]):
                for call in calls:
                    await engine.rpc(*call)
                assert await engine.rpc("drafter_fingerprints") == before
                num_restored += 1
                metrics = await engine.metrics()
                assert (metrics["draft/restored"], metrics["draft/restore_failures"]) == (num_restored, 0)

        try:
            prompts = make_prompts(8, seed=2)
            loaded, share = await engine.rpc("drafter_fingerprints"), await accepted_share(engine, prompts)
            await engine.rpc("reload_weights")
            assert (await engine.metrics())["draft/restored"] == 0, "an ordinary reload loses nothing"
            for method in ("reload_weights", "wake_up"):
                await engine.rpc("lose_drafter_in", method)
            await wiped(num_restored=0)
            assert await accepted_share(engine, prompts) == pytest.approx(share, rel=0.02)
            weights = drafter_weights(tmp_path / "random" / "model.safetensors")
            receipt = await engine.receive(sender.stage(1, weights.items(), target="drafter"))
            assert receipt.ok, receipt
            assert await engine.rpc("drafter_fingerprints") != loaded, "the pushed drafter must stay"
            await wiped(num_restored=2)
        finally:
            sender.close()
            await engine.close()

    runner.run(scenario())


async def accepted_share(engine: VllmEngine, prompts: Sequence[Tokens]) -> float:
    """Share of drafted tokens that are accepted in this batch, greedily."""
    start = await engine.metrics()
    await greedy(engine, prompts, MAX_TOKENS)
    end = await engine.metrics()
    drafted, accepted = (end[key] - start[key] for key in ("engine/drafted_tokens", "engine/accepted_tokens"))
    return accepted / drafted


async def prefix_hits(engine: VllmEngine) -> float:
    """Tokens of a prompt, always the same, that the engine has in its cache."""
    start = await engine.metrics()
    await greedy(engine, [np.arange(4 * BLOCK, dtype=np.int32) % 16], 1)
    return (await engine.metrics())["engine/prefix_cache_hits"] - start["engine/prefix_cache_hits"]
