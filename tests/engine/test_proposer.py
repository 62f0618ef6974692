"""The history drafter inside the real vLLM: it learns from one epoch for the next and changes no greedy token."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from paceline.config import EngineConfig, FixedSelector, HistoryDrafter, SpeculationConfig
from paceline.rollout.arguments import engine_args
from paceline.rollout.engine import VllmEngine
from paceline.types import GroupId, Rollout, RolloutId, RolloutRequest

DRAFT_LENGTH = 4


def speculation(share_directory: Path | None) -> SpeculationConfig:
    drafter = HistoryDrafter(capacity_mb=8, share_directory=share_directory)
    return SpeculationConfig(
        drafter=drafter, max_draft_length=DRAFT_LENGTH, selector=FixedSelector(draft_length=DRAFT_LENGTH)
    )


@dataclass(frozen=True, slots=True)
class Setting:
    engine: VllmEngine
    share_directory: Path


@pytest.fixture(scope="module")
def setting(
    runner: asyncio.Runner,
    policy_path: Path,
    engine_config: EngineConfig,
    one_cpu: list[int],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Setting]:
    directory = tmp_path_factory.mktemp("share")
    engine = runner.run(
        VllmEngine.start(
            "history", policy_path, engine_config, seed=0, cpus=one_cpu, speculation=speculation(directory)
        )
    )
    yield Setting(engine, directory)
    runner.run(engine.close())


def epoch(*, temperature: float, first_token: int, groups: int = 3, size: int = 8) -> list[RolloutRequest]:
    """More requests than the engine takes at once, of different lengths, so that rows are moved and reused."""
    return [
        RolloutRequest(
            group_id=GroupId(group),
            index=index,
            prompt_ids=np.array([first_token, group + 2, 7, 8, 9], np.int32),
            max_tokens=20 + 5 * index,
            temperature=temperature,
            seed=None,
        )
        for group in range(groups)
        for index in range(size)
    ]


async def generate(engine: VllmEngine, wanted: list[RolloutRequest]) -> dict[RolloutId, Rollout]:
    await engine.submit(wanted)
    rollouts: list[Rollout] = []
    while len(rollouts) < len(wanted):
        rollouts += await engine.collect()
    return {rollout.id: rollout for rollout in rollouts}


async def figures(engine: VllmEngine) -> dict[str, float]:
    (answer,) = await engine.rpc("drafter_counters")
    return answer


def test_second_epoch_is_accepted_in_full_and_greedy_output_stays(runner: asyncio.Runner, setting: Setting) -> None:
    """A greedy policy repeats itself: every draft of the second epoch is right, unless rows were taken for one
    another."""
    first = runner.run(generate(setting.engine, epoch(temperature=0.0, first_token=3)))
    second = runner.run(generate(setting.engine, epoch(temperature=0.0, first_token=3)))
    assert {key: rollout.token_ids.tolist() for key, rollout in first.items()} == {
        key: rollout.token_ids.tolist() for key, rollout in second.items()
    }
    emitted = sum(len(rollout.token_ids) - 1 for rollout in second.values())
    verifications = sum(rollout.num_verifications for rollout in second.values())
    assert emitted / verifications > 0.8 * (DRAFT_LENGTH + 1)


def test_figures_add_up(runner: asyncio.Runner, setting: Setting) -> None:
    before = runner.run(figures(setting.engine))
    rollouts = runner.run(generate(setting.engine, epoch(temperature=1.0, first_token=4))).values()
    after = runner.run(figures(setting.engine))
    change = {name: after[name] - before[name] for name in after}
    assert change["failures"] == 0
    # Every step of every rollout was one row: its first token, then one token and what was accepted.
    tokens, accepted = (
        sum(len(rollout.token_ids) for rollout in rollouts),
        sum(rollout.num_accepted for rollout in rollouts),
    )
    assert tokens - accepted <= change["num_rows"] <= tokens - accepted + len(rollouts) * DRAFT_LENGTH
    assert 0 < change["num_matched"] <= change["num_rows"]
    assert change["num_drafted"] >= sum(rollout.num_drafted for rollout in rollouts) > 0
    assert 0 < change["seconds"] < 1
    assert 0 < change["full_batch_seconds"] < change["full_batch_step_seconds"]


def test_rollouts_are_left_for_other_engines(runner: asyncio.Runner, setting: Setting) -> None:
    from paceline.drafters.history_exchange import decode
    from random_policy import VOCABULARY

    rollouts = runner.run(generate(setting.engine, epoch(temperature=1.0, first_token=5)))
    runner.run(asyncio.sleep(2.1))
    # A rollout is known to have ended when it is no longer in the batch, and files are written every two seconds.
    runner.run(generate(setting.engine, epoch(temperature=1.0, first_token=6, groups=1, size=1)))
    shared = [
        record
        for file in setting.share_directory.glob("*.rollouts")
        for record in decode(file.read_bytes(), VOCABULARY)
    ]
    responses = {tuple(record.token_ids[record.num_context :].tolist()) for record in shared}
    # What was drafted beyond the end of a rollout may hang on its end.
    for rollout in rollouts.values():
        own = tuple(rollout.token_ids.tolist())
        assert any(response[: len(own)] == own for response in responses)


def test_a_failing_drafter_costs_its_drafts_and_nothing_else(policy_path: Path, engine_config: EngineConfig) -> None:
    from paceline.rollout.proposer import HistoryProposer

    proposer = HistoryProposer(engine_args(policy_path, engine_config, 0, speculation(None)).create_engine_config())
    good = np.ones((16, 256), np.int32)
    length = np.full(16, 8, np.int32)
    assert proposer.propose([[1], [1]], length, good) != [[], []]
    assert proposer.propose([[1], [1]], length, np.ones(3, np.int32)) == [[], []]
    assert proposer.counters()["failures"] == 1
    assert proposer.propose([[1], [1]], length + 1, good) != [[], []], "it goes on afterward"
