"""Failures planted in a real engine are found in metrics.jsonl by name, and its scheduler answers to calls."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contexts import arena_config
from paceline.config import EngineConfig, FixedSelector, HistoryDrafter, SpeculationConfig
from paceline.metrics import JsonlSink, Recorder, read_metrics
from paceline.monitor import TESTS, limit_log10
from paceline.orchestrator.loop import Parts, train
from paceline.orchestrator.members import Members
from paceline.plan.simulate import SimulatedLearner, score_by_parity
from paceline.report.run import write_report
from paceline.rollout.engine import VllmEngine
from paceline.types import GroupId, Prompt, Receipt, RolloutRequest

DRAFT_LENGTH = 3
SETTINGS = [
    "run.steps=2",
    "rollout.prompts_per_step=2",
    "rollout.group_size=8",
    "rollout.max_tokens=60",
    "rollout.engine.max_num_seqs=16",
    "eval.every=0",
]


def plant(args: Any) -> None:
    args.scheduler_cls = "planted.FailingScheduler"
    args.speculative_config["model"] = "planted.FailingProposer"


@pytest.fixture(scope="module")
def engine(
    runner: asyncio.Runner, policy_path: Path, engine_config: EngineConfig, one_cpu: list[int]
) -> Iterator[VllmEngine]:
    speculation = SpeculationConfig(
        drafter=HistoryDrafter(capacity_mb=8),
        max_draft_length=DRAFT_LENGTH,
        selector=FixedSelector(draft_length=DRAFT_LENGTH),
    )
    engine = runner.run(
        VllmEngine.start(
            "real", policy_path, engine_config, seed=0, cpus=one_cpu, speculation=speculation, adjust=plant
        )
    )
    yield engine
    runner.run(engine.close())


@dataclass
class Wire:
    """Everybody has every version."""

    async def send(self, version: int) -> Sequence[Receipt]:
        return [Receipt(engine="real", version=version, num_tensors=1, num_bytes=1, seconds=0.0)]


class BrokenSink:
    def write(self, kind: str, record: Mapping[str, Any]) -> None:
        raise OSError("planted")

    def close(self) -> None:
        return


def prompts() -> Iterator[Prompt]:
    for number in range(10**6):
        ids = np.array([3, 2 + number % 4, 7, 8, 9], np.int32)
        yield Prompt(id=str(number % 4), text="", token_ids=ids, row={})


@pytest.fixture(scope="module")
def run_dir(runner: asyncio.Runner, engine: VllmEngine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run")
    recorder = Recorder(JsonlSink(directory / "metrics.jsonl"), [BrokenSink()])
    parts = Parts(
        members=Members([engine]),
        learner=SimulatedLearner(),
        sender=Wire(),
        prompts=prompts(),
        heldout=[],
        score=score_by_parity,
    )
    runner.run(train(parts, arena_config(SETTINGS), recorder))
    recorder.close()
    return directory


def test_planted_failures_are_in_metrics_jsonl(run_dir: Path) -> None:
    """Nobody looks where it is not written down: each failure costs speed or a picture, and would go on for ever."""
    for record in read_metrics(run_dir / "metrics.jsonl")["step"]:
        metrics = record["metrics"]
        for key in ("selector/failures", "history/failures", "metrics/sink_errors"):
            assert metrics[key] > 0, key
        assert metrics["engine/metrics_failed"] == 0


def test_counters_of_a_step_agree_with_its_rollouts(run_dir: Path) -> None:
    records = read_metrics(run_dir / "metrics.jsonl")
    for record, rollouts in zip(records["step"], records["rollouts"], strict=True):
        metrics = record["metrics"]
        assert metrics["engine/generated_tokens"] == sum(rollouts["length"])
        assert metrics["engine/drafted_tokens"] >= metrics["rollout/num_drafted"] > 0
        steps_at = [metrics[f"selector/steps_at_k{k}"] for k in range(DRAFT_LENGTH + 1)]
        assert steps_at[0] > 0 and steps_at[DRAFT_LENGTH] > 0 and sum(steps_at[1:DRAFT_LENGTH]) == 0
        assert metrics["selector/draft_length_mean"] == pytest.approx(DRAFT_LENGTH * steps_at[-1] / sum(steps_at))
        assert 0 < metrics["engine/kv_usage_max"] <= 1
        assert 0 <= metrics["engine/prefix_cache_hit_share"] <= 1
        assert 0 < metrics["history/matched_share"] <= 1
        assert metrics["engine/preemptions"] == 0


def test_monitor_has_examined_what_it_may_and_found_nothing(run_dir: Path) -> None:
    """A monitor that is not installed, or that fails at every examination, finds nothing either."""
    steps = [record["metrics"] for record in read_metrics(run_dir / "metrics.jsonl")["step"]]
    assert sum(metrics["monitor/positions"] for metrics in steps) > 0
    assert all(metrics["monitor/failures"] == metrics["monitor/alarms"] == 0 for metrics in steps)
    assert all(metrics[f"monitor/{test}_log10"] < limit_log10(1) for metrics in steps for test in TESTS)


def test_draft_length_over_time_lies_within_the_step(run_dir: Path) -> None:
    records = read_metrics(run_dir / "metrics.jsonl")
    for drafted, rollouts, step in zip(records["draft_length"], records["rollouts"], records["step"], strict=True):
        assert drafted["engines"] == ["real"]
        assert min(drafted["begin_s"]) >= min(rollouts["start_s"]) - 1
        assert max(drafted["begin_s"]) <= max(rollouts["end_s"])
        steps = sum(step["metrics"][f"selector/steps_at_k{k}"] for k in range(DRAFT_LENGTH + 1))
        assert sum(drafted["num_steps"]) == steps


def test_report_names_the_failures_and_draws_the_draft_length(run_dir: Path) -> None:
    page = write_report(run_dir).read_text(encoding="utf-8")
    assert "selector/failures" in page and "history/failures" in page and "metrics/sink_errors" in page
    assert "draft length" in page and "Losslessness alarms" in page


def test_draft_limit_stops_speculation_and_allows_it_again(runner: asyncio.Runner, engine: VllmEngine) -> None:
    """A drafter that is lost costs time at every step until it is stopped."""

    async def drafted(limit: int | None) -> float:
        await engine.set_draft_limit(limit)
        before = await engine.metrics()
        wanted = [
            RolloutRequest(
                group_id=GroupId(0), index=index, prompt_ids=prompt.token_ids, max_tokens=60, temperature=0.0
            )
            for index, prompt in enumerate(islice(prompts(), 4))
        ]
        await engine.submit(wanted)
        done = 0
        while done < len(wanted):
            done += len(await engine.collect())
        after = await engine.metrics()
        steps = {k: after[f"selector/steps_at_k{k}"] - before[f"selector/steps_at_k{k}"] for k in range(4)}
        return max(k for k, num_steps in steps.items() if num_steps)

    async def scenario() -> list[float]:
        return [await drafted(0), await drafted(1), await drafted(None)]

    assert runner.run(scenario()) == [0, 1, DRAFT_LENGTH]
