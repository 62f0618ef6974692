"""Simulate a run: the real loop with batching engines, a learner and a weight wire that only take time.

scenario ──▶ train (orchestrator/loop.py) with fleet, ledger and selectors ──▶ times by stage
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import count
from typing import Any

from paceline.config import Config, FixedSelector, SelectorConfig, load_config
from paceline.metrics import Recorder
from paceline.orchestrator.loop import Parts, train
from paceline.orchestrator.members import Members
from paceline.orchestrator.online_drafter import OnlineDrafter
from paceline.plan.batching import BatchingEngine
from paceline.plan.engine_model import StepModel, cost_file
from paceline.plan.lengths import Lengths
from paceline.plan.simulate import SimulatedLearner, run_virtual, score_by_parity, simulated_prompts
from paceline.selector.cost import CostModel
from paceline.selector.graphs import batch_grid
from paceline.selector.select import Measured, Selector, build_selector
from paceline.types import Receipt

STAGES = ("generation", "prepare", "logprob", "train", "sync")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Everything that the duration of a run depends on."""

    model: StepModel
    num_engines: int
    num_groups: int
    group_size: int
    lengths: Lengths
    prompt_tokens: int = 256
    max_num_seqs: int = 256
    selector: SelectorConfig | None = None
    """If None, the run does not speculate."""
    max_age: int = 0
    learner_s_per_token: float = 0.0
    """Seconds of the update per token; scoring takes another third."""
    sync_s: float = 0.0
    steps: int = 1

    @property
    def num_rollouts(self) -> int:
        return self.num_groups * self.group_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Mean seconds of one RL step, by stage."""

    step_s: float
    stages_s: Mapping[str, float]
    tokens: float
    accepted_length: float
    """1 without drafts."""
    idle_share: float
    """Share of the engines' time without requests."""
    num_preempted: int

    @property
    def generation_s(self) -> float:
        return self.stages_s["generation"]


class _Steps:
    def __init__(self) -> None:
        self.steps: list[Mapping[str, float]] = []

    def write(self, kind: str, record: Mapping[str, Any]) -> None:
        if kind == "step":
            self.steps.append(record["metrics"])

    def close(self) -> None:
        return


@dataclass(slots=True, kw_only=True)
class PausingSender:
    """Wire that pauses every engine for the duration of a push."""

    engines: Sequence[BatchingEngine]
    seconds: float

    async def send(self, version: int) -> Sequence[Receipt]:
        for engine in self.engines:
            await engine.pause()
        await asyncio.sleep(self.seconds)
        for engine in self.engines:
            engine.policy_version = version
            await engine.resume()
        return [
            Receipt(engine=engine.name, version=version, num_tensors=1, num_bytes=1, seconds=self.seconds)
            for engine in self.engines
        ]


def simulate(scenario: Scenario) -> Times:
    """Run the loop in virtual time. Steps that fill the pipeline of an asynchronous run are not counted."""
    config = _config(scenario)
    sink = _Steps()
    engines: list[BatchingEngine] = []

    async def work() -> None:
        length_of = scenario.lengths.by_request(scenario.num_groups, scenario.group_size)
        engines.extend(
            BatchingEngine(
                name=f"engine-{index}",
                model=scenario.model,
                selector=selector,
                length_of=length_of,
                max_num_seqs=scenario.max_num_seqs,
            )
            for index, selector in zip(range(scenario.num_engines), _selectors(scenario), strict=False)
        )
        parts = Parts(
            members=Members(engines),
            learner=SimulatedLearner(seconds_per_token=scenario.learner_s_per_token),
            sender=PausingSender(engines=engines, seconds=scenario.sync_s),
            prompts=simulated_prompts(scenario.prompt_tokens),
            heldout=[],
            score=score_by_parity,
            drafter=OnlineDrafter(),
        )
        await train(parts, config, Recorder(sink))

    _, seconds = run_virtual(work)
    return _times(scenario, sink, engines, seconds)


def _config(scenario: Scenario) -> Config:
    return load_config(
        None,
        [
            "policy.model=simulated",
            f"run.steps={scenario.steps + 2 * scenario.max_age}",
            f"run.max_age={scenario.max_age}",
            f"rollout.prompts_per_step={scenario.num_groups}",
            f"rollout.group_size={scenario.group_size}",
            f"rollout.max_tokens={scenario.lengths.maximum}",
            f"rollout.engine.max_num_seqs={scenario.max_num_seqs}",
            f"rollout.engine.max_model_len={scenario.lengths.maximum + scenario.prompt_tokens + 8}",
            "objective.drop_uniform_groups=false",
            "eval.every=0",
        ],
    )


def _selectors(scenario: Scenario) -> Iterator[Selector]:
    """Yield a selector per engine. Measured selectors share one prior: the cost file of this engine."""
    longest = max(scenario.model.options)
    config = scenario.selector or FixedSelector(draft_length=0)
    if config.kind == "measured" and config.costs is None:
        batches = tuple(batch_grid(scenario.max_num_seqs)[::4])
        prior = cost_file(scenario.model, batches=batches, context=scenario.prompt_tokens + scenario.lengths.mean / 2)
        model = CostModel(longest, prior)
        while True:
            yield Measured(deepcopy(model), max_draft_length=longest)
    for seed in count():
        yield build_selector(config, max_draft_length=longest, max_num_requests=scenario.max_num_seqs, seed=seed)


def _times(scenario: Scenario, sink: _Steps, engines: Sequence[BatchingEngine], seconds: float) -> Times:
    counted = sink.steps[scenario.max_age : len(sink.steps) - scenario.max_age]

    def mean(key: str) -> float:
        return sum(step.get(key, 0.0) for step in counted) / len(counted)

    lengths = [step["rollout/accepted_length"] for step in counted if "rollout/accepted_length" in step]
    return Times(
        step_s=mean("time/step"),
        stages_s={stage: mean(f"time/{stage}") for stage in STAGES},
        tokens=mean("rollout/num_tokens"),
        accepted_length=sum(lengths) / len(lengths) if lengths else 1.0,
        idle_share=1 - sum(engine.busy_s for engine in engines) / (seconds * len(engines)),
        num_preempted=sum(engine.num_preempted for engine in engines),
    )
