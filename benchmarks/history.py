"""What the history drafter gains on a second epoch, and what its proposals cost.

    accepted_length = tokens / engine steps, over all rollouts of the second epoch; a rollout's first token, which its
                      prompt's pass emits, is left out of both, and a step without drafts counts as any other
    proposal_share  = seconds inside `propose` / seconds of whole steps, at a full batch

Every repetition takes prompts that the engine has not met, answers them once (the first epoch, which has only siblings
in flight to learn from) and then again with other seeds, at temperature 1. The policy is the same in both: how much an
update between epochs costs is not measured here. Each step drafts `draft_length` tokens.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.workload import arena_requests
from paceline.config import EngineConfig, FixedSelector, HistoryDrafter, SpeculationConfig
from paceline.context import Context
from paceline.measure import CpuTimes, Result, environment, middle
from paceline.orchestrator.generate import generate_all
from paceline.rollout.engine import VllmEngine
from paceline.sessions.workloads import resolve_policy
from paceline.types import RolloutRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class _Epoch:
    """One pass over the prompts: its tokens, and by how much the drafter's counters rose."""

    num_rollouts: int
    num_tokens: int
    num_accepted: int
    num_verifications: int
    counted: dict[str, float]

    @property
    def accepted_length(self) -> float:
        return (self.num_tokens - self.num_rollouts) / (self.counted["num_rows"] - self.num_rollouts)

    @property
    def proposal_share(self) -> float:
        return self.counted["full_batch_seconds"] / self.counted["full_batch_step_seconds"]

    @property
    def proposal_ms(self) -> float:
        return 1e3 * self.counted["seconds"] / self.counted["num_proposals"]


def run(
    *,
    context: Context,
    model: str = "arena:large",
    prompts: int = 10,
    group_size: int = 8,
    max_tokens: int = 128,
    draft_length: int = 4,
    max_requests: int = 64,
    repetitions: int = 3,
    seed: int = 0,
) -> Result:
    """Two epochs over `prompts` new prompts, `repetitions` times, with up to `max_requests` requests in flight."""
    path = resolve_policy(model, context)
    config = EngineConfig(max_model_len=768, max_num_seqs=max_requests, kv_cache_gb=4.0, compile=True)
    selector = FixedSelector(draft_length=draft_length)
    speculation = SpeculationConfig(drafter=HistoryDrafter(), max_draft_length=draft_length, selector=selector)
    before = CpuTimes.now()
    batches = [
        arena_requests(path, num_prompts=prompts, group_size=group_size, max_tokens=max_tokens, seed=seed + number)
        for number in range(repetitions)
    ]
    first, second = asyncio.run(_measure(path, config, speculation, batches, seed, context))
    figures, spread = {}, {}
    figures["accepted_length"], spread["accepted_length"] = middle([epoch.accepted_length for epoch in second])
    figures["proposal_share"], spread["proposal_share"] = middle([epoch.proposal_share for epoch in second])
    figures["first_epoch_accepted_length"], spread["first_epoch_accepted_length"] = middle(
        [epoch.accepted_length for epoch in first]
    )
    figures["proposal_ms"], spread["proposal_ms"] = middle([epoch.proposal_ms for epoch in second])
    return Result(
        name="history",
        figures=figures,
        spread=spread,
        goals={"accepted_length": (">=", 2.0), "proposal_share": ("<=", 0.02)},
        environment=environment(
            seeds=[seed + number for number in range(repetitions)],
            config={
                "model": model,
                "engine": config.model_dump(mode="json"),
                "speculation": speculation.model_dump(mode="json"),
            },
        ),
        details={
            "repetitions": repetitions,
            "prompts": prompts,
            "group_size": group_size,
            "max_tokens": max_tokens,
            "first_epoch": [_row(epoch) for epoch in first],
            "second_epoch": [_row(epoch) for epoch in second],
            "steal_share": CpuTimes.now().steal_share_since(before),
        },
    )


def _row(epoch: _Epoch) -> dict[str, object]:
    return {
        "accepted_length": epoch.accepted_length,
        "proposal_share": epoch.proposal_share,
        "tokens": epoch.num_tokens,
        "accepted_per_verification": epoch.num_accepted / epoch.num_verifications,
        "counted": epoch.counted,
    }


async def _measure(
    path: Path,
    config: EngineConfig,
    speculation: SpeculationConfig,
    batches: Sequence[Sequence[RolloutRequest]],
    seed: int,
    context: Context,
) -> tuple[list[_Epoch], list[_Epoch]]:
    cpus = sorted(os.sched_getaffinity(0))
    context.progress("starting and compiling the engine")
    engine = await VllmEngine.start("history", path, config, seed=seed, cpus=cpus, speculation=speculation)
    first: list[_Epoch] = []
    second: list[_Epoch] = []
    try:
        for number, batch in enumerate(batches):
            for name, epochs in (("first", first), ("second", second)):
                epoch = await _epoch(engine, batch)
                epochs.append(epoch)
                share = 100 * epoch.proposal_share
                context.progress(
                    f"repetition {number + 1}/{len(batches)}, {name} epoch: accepted length "
                    f"{epoch.accepted_length:.2f}, "
                    f"proposals {share:.2f} % of a step"
                )
    finally:
        await engine.close()
    return first, second


async def _epoch(engine: VllmEngine, requests: Sequence[RolloutRequest]) -> _Epoch:
    before = await _counted(engine)
    rollouts = await generate_all(engine, requests)
    after = await _counted(engine)
    return _Epoch(
        num_rollouts=len(rollouts),
        num_tokens=sum(len(rollout.token_ids) for rollout in rollouts),
        num_accepted=sum(rollout.num_accepted for rollout in rollouts),
        num_verifications=sum(rollout.num_verifications for rollout in rollouts),
        counted={name: after[name] - before[name] for name in after},
    )


async def _counted(engine: VllmEngine) -> dict[str, float]:
    (counted,) = await engine.rpc("drafter_counters")
    return counted
