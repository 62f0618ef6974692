"""A run that begins without a learned drafter: when the switch from history pays, and that it costs no rollout."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.simulated import SimulatedEngine, SimulatedSender, long_tailed_lengths
from contexts import arena_config
from memory_store import MemoryStore, SimulatedTrainer
from paceline.drafters.kinds import draft_costs
from paceline.drafters.switch import SwitchMonitor, best_rate, decide_switch
from paceline.metrics import JsonlSink, Recorder, read_metrics
from paceline.orchestrator.drafter_switch import DrafterSwitch
from paceline.orchestrator.drafter_training import OnlineDrafterTraining
from paceline.orchestrator.loop import Parts, train
from paceline.orchestrator.members import Members
from paceline.orchestrator.recovery import Recovery
from paceline.plan.simulate import SimulatedLearner, run_virtual, score_by_parity, simulated_prompts
from paceline.types import PacelineError, Receipt, Rollout

FREE = [0.0, 0.0, 0.0, 0.0]
"""Costs of up to three drafts that take no time."""


@pytest.mark.parametrize(
    ("steps_left", "learned", "start_s", "switches", "why"),
    [
        (20, 3.0, 30.0, True, "gain exceeds cost"),  # half of 10 s in 20 steps, for two starts of 30 s
        (12, 3.0, 30.0, False, "cost exceeds gain"),
        (0, 9.0, 0.1, False, "cost exceeds gain"),
        (20, 3.0, 50.0, False, "cost exceeds gain"),
        (10_000, 1.5, 30.0, False, "history drafts as well"),
        (10_000, 1.4, 0.0, False, "history drafts as well"),
        (10_000, float("nan"), 0.0, False, "history drafts as well"),
        (10_000, None, 0.0, False, "nothing measured yet"),
    ],
)
def test_engines_switch_only_if_the_steps_that_are_left_pay_for_it(
    steps_left: int, learned: float | None, start_s: float, switches: bool, why: str
) -> None:
    decision = decide_switch(history=1.5, learned=learned, generation_s=10.0, steps_left=steps_left, start_s=start_s)
    assert (decision.switch, decision.why) == (switches, why)
    assert decision.cost_s == 2 * start_s


def test_gain_is_the_time_that_is_saved_in_all_steps_that_are_left() -> None:
    decision = decide_switch(history=1.5, learned=3.0, generation_s=10.0, steps_left=20, start_s=30.0)
    assert decision.metrics() == {"draft/switch_gain_s": 100.0, "draft/switch_cost_s": 60.0}


def test_nothing_is_decided_before_engines_have_drafted_from_history() -> None:
    decision = decide_switch(history=None, learned=3.0, generation_s=0.0, steps_left=10_000, start_s=0.0)
    assert not decision.switch


def test_drafts_that_cost_nothing_are_worth_what_is_accepted_of_them() -> None:
    assert best_rate(2.5, FREE) == pytest.approx(2.5)
    assert best_rate(1.0, FREE) == pytest.approx(1.0)
    assert best_rate(9.0, FREE) == pytest.approx(4.0)  # more than there is
    assert best_rate(float("nan"), FREE) == pytest.approx(1.0)


def test_drafts_that_cost_more_than_they_bring_are_not_counted() -> None:
    """The time of a draft is what a lookup in history does not have: without it every drafter would look better."""
    # With an acceptance of a half there are 1, 1.5, 1.75, 1.875 tokens in 1, 1.2, 1.4, 1.6 passes.
    assert best_rate(1.875, [0.0, 0.2, 0.4, 0.6]) == pytest.approx(1.25)
    assert best_rate(1.875, [0.0, 0.6, 1.2, 1.8]) == pytest.approx(1.0)


@pytest.mark.parametrize(("kind", "costs"), [("eagle3", [0.0, 0.2, 0.4]), ("dflash", [0.0, 0.2, 0.2])])
@pytest.mark.parametrize("tied", [False, True])
def test_a_pass_costs_what_it_reads(kind: str, costs: list[float], tied: bool, tmp_path: Path) -> None:
    """Rows are looked up in an embedding; where it is the output head too, all of it is read."""
    head = {} if tied else {"lm_head.weight": torch.zeros(10, 4)}
    policy = {"model.embed_tokens.weight": torch.zeros(10, 4), "model.layers.0.weight": torch.zeros(60), **head}
    drafter = {
        "embed_tokens.weight": torch.zeros(10, 4),
        "lm_head.weight": torch.zeros(5, 2),
        "fc.weight": torch.zeros(10),
    }
    for name, weights in (("policy", policy), ("drafter", drafter)):
        (tmp_path / name).mkdir()
        save_file(weights, tmp_path / name / "model.safetensors")
    found = draft_costs(tmp_path / "drafter", tmp_path / "policy", kind=kind, max_draft_length=2)
    assert found == pytest.approx(costs)


def test_history_is_judged_by_all_tokens_and_not_by_verified_drafts_alone() -> None:
    """It has no draft for most tokens of a new prompt: per verification it would look like a perfect drafter."""
    monitor = SwitchMonitor(FREE)
    monitor.observe(num_tokens=1000, num_accepted=90, generation_s=10.0)
    monitor.promise(2.0)
    decision = monitor.decide(steps_left=10, start_s=0.0)
    assert decision.gain_s == pytest.approx(10.0 * (1 - 1000 / 910 / 2.0) * 10, rel=1e-3)


def test_a_monitor_goes_on_where_it_was() -> None:
    before, after = SwitchMonitor(FREE), SwitchMonitor(FREE)
    before.observe(num_tokens=1000, num_accepted=90, generation_s=10.0)
    before.promise(2.0)
    after.restore(before.state())
    assert after.decide(steps_left=10, start_s=1.0) == before.decide(steps_left=10, start_s=1.0)


# The switch in a simulated run.

SETTINGS = [
    "rollout.prompts_per_step=8",
    "rollout.group_size=4",
    "rollout.engine.max_num_seqs=4",
    "eval.every=0",
    "speculation.drafter.kind=eagle3",
    "speculation.drafter.init=random",
    "speculation.training.mode=idle",
    "speculation.training.round_tokens=200",
]
START_S = 3.0


@dataclass(slots=True, kw_only=True)
class DraftingEngine(SimulatedEngine):
    """Accepts a tenth of its tokens as drafts from history, and two thirds from a learned drafter that it was given."""

    kind: str = "history"
    round: int = 0
    """The drafter that it was given since its start; 0 is none."""
    has_policy: bool = True

    async def collect(self) -> Sequence[Rollout]:
        assert self.has_policy, "it samples from the policy that the run began with"
        share = 0.1 if self.kind == "history" else 2 / 3 if self.round else 0.0
        found = await SimulatedEngine.collect(self)
        return [
            replace(r, num_verifications=50, num_drafted=150, num_accepted=int(share * len(r.token_ids))) for r in found
        ]


@dataclass(kw_only=True)
class Wire(SimulatedSender):
    """Restarts, policies and drafters as engines see them."""

    drafting: list[DraftingEngine]
    start_s: float = START_S
    fails: bool = False
    """The last engine does not start with a learned drafter."""
    starts: list[str] = field(default_factory=list)
    drafters: list[int] = field(default_factory=list)

    async def draft_with(self, *, learned: bool) -> None:
        assert not any(engine._running or engine._waiting for engine in self.drafting), "an engine was at work"
        await asyncio.sleep(self.start_s)
        kind = "learned" if learned else "history"
        self.starts.append(kind)
        for engine in self.drafting:
            engine.kind, engine.round, engine.has_policy = kind, 0, False
        if learned and self.fails:
            self.drafting[-1].kind = "none"
            raise PacelineError("1 of 2 engines did not start: no room")

    async def send(self, version: int) -> Sequence[Receipt]:
        for engine in self.drafting:
            assert engine.kind != "none", "an engine that did not start gets a policy"
            engine.has_policy = True
        return await super().send(version)

    async def send_drafter(self, number: int) -> Sequence[Receipt]:
        self.drafters.append(number)
        for engine in self.drafting:
            assert engine.kind == "learned", "an engine without a learned drafter gets weights of one"
            assert engine.has_policy
            engine.round = number
        return [Receipt(engine=e.name, version=number, num_tensors=1, num_bytes=1, seconds=0.0) for e in self.drafting]

    async def stop_speculation(self) -> None:
        raise AssertionError("a drafter was lost")


@dataclass
class Outcome:
    records: dict
    wire: Wire

    def steps(self, key: str) -> list[float]:
        return [record["metrics"][key] for record in self.records["step"]]

    def events(self, what: str) -> list[dict]:
        return [event for event in self.records["event"] if event["what"] == what]


def simulate(
    tmp_path: Path, steps: int, *, store: MemoryStore | None = None, checkpoint_every: int = 0, fails: bool = False
) -> Outcome:
    config = arena_config([*SETTINGS, f"run.steps={steps}", f"run.checkpoint_every={checkpoint_every}"])
    assert config.speculation is not None
    training = config.speculation.training
    store = store or MemoryStore(lambda number: 3.0 if number else 1.0)
    recorder = Recorder(JsonlSink(tmp_path / "metrics.jsonl"))

    async def work() -> Wire:
        engines = [
            DraftingEngine(name=name, length_of=long_tailed_lengths(0), max_num_seqs=4, seconds_per_token=pace_s)
            for name, pace_s in (("engine-0", 0.01), ("engine-1", 0.0101))
        ]
        wire = Wire(engines=engines, drafting=engines, fails=fails)
        members = Members(engines)
        trainers = [SimulatedTrainer(store, tokens_per_s=1000.0) for _ in engines]
        switch = DrafterSwitch(wire, SwitchMonitor(FREE))
        parts = Parts(
            members=members,
            learner=SimulatedLearner(),
            sender=wire,
            prompts=simulated_prompts(),
            heldout=[],
            score=score_by_parity,
            drafter=OnlineDrafterTraining(members, trainers, wire, store, training, switch=switch),
        )
        await train(parts, config, recorder, recovery=Recovery(tmp_path, config))
        return wire

    wire, _ = run_virtual(work)
    recorder.close()
    outcome = Outcome(read_metrics(tmp_path / "metrics.jsonl"), wire)
    assert [len(record["length"]) for record in outcome.records["rollouts"]] == [32] * steps
    return outcome


def test_engines_switch_between_batches_once_a_drafter_is_trained(tmp_path: Path) -> None:
    """They are idle, get the policy before the drafter, and no drafter before they can use one: the wire asserts it."""
    outcome = simulate(tmp_path, 12)
    assert outcome.wire.starts == ["learned"]
    (switched,) = outcome.events("drafter_switched")
    before = switched["step"] - 1
    assert 0 < before < 11 and outcome.steps("draft/learned") == [0.0] * before + [1.0] * (12 - before)
    assert switched["expected_gain_s"] > switched["cost_s"] == 2 * START_S and switched["restart_s"] == START_S
    published = outcome.events("drafter_published")[0]
    assert published["step"] < switched["step"] and not published["in_engines"]
    assert outcome.wire.drafters[0] == published["round"] and {e.round for e in outcome.wire.drafting} != {0}
    assert outcome.steps("rollout/num_accepted")[-1] > 3 * outcome.steps("rollout/num_accepted")[0]
    assert sum(outcome.steps("draft/failures")) == 0 and not outcome.events("drafter_lost")


def test_engines_stay_with_history_where_too_few_steps_are_left(tmp_path: Path) -> None:
    outcome = simulate(tmp_path, 3)
    assert outcome.wire.starts == [] and outcome.wire.drafters == []
    assert outcome.events("drafter_published"), "there was nothing to switch to"
    assert outcome.steps("draft/learned") == [0.0] * 3
    assert outcome.steps("draft/switch_gain_s")[-1] < outcome.steps("draft/switch_cost_s")[-1] == 2 * START_S


def test_engines_stay_with_history_while_it_drafts_as_well(tmp_path: Path) -> None:
    outcome = simulate(tmp_path, 12, store=MemoryStore(lambda number: 1.05 if number else 1.0))
    assert outcome.wire.starts == [] and set(outcome.steps("draft/learned")) == {0.0}
    assert outcome.steps("draft/decision") == [1.0] * 12, "training ended before the drafter was of use"


def test_an_engine_that_does_not_start_with_the_drafter_costs_no_rollout(tmp_path: Path) -> None:
    """All engines draft from history again, and it is not tried a second time."""
    outcome = simulate(tmp_path, 12, fails=True)
    assert outcome.wire.starts == ["learned", "history"] and outcome.wire.drafters == []
    assert {engine.kind for engine in outcome.wire.drafting} == {"history"}
    (failed,) = outcome.events("drafter_training_failed")
    assert failed["during"] == "switch" and "no room" in failed["why"]
    assert sum(outcome.steps("draft/failures")) == 1 and set(outcome.steps("draft/learned")) == {0.0}
    assert outcome.steps("draft/decision")[-1] == 0.0, "a drafter is trained on that nobody will use"


def test_a_run_that_goes_on_after_its_switch_drafts_with_the_drafter_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its engines start with history, and the steps that are left would not pay for a switch."""

    async def at_once(function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)  # the virtual clock knows no threads

    monkeypatch.setattr(asyncio, "to_thread", at_once)
    store = MemoryStore(lambda number: 3.0 if number else 1.0)
    simulate(tmp_path, 12, store=store, checkpoint_every=12)
    published = store.published()
    outcome = simulate(tmp_path, 13, store=store, checkpoint_every=12)
    assert outcome.wire.starts == ["learned"] and outcome.wire.drafters[0] == published
    assert outcome.steps("draft/learned")[12:] == [1.0]
    assert [event["why"] for event in outcome.events("drafter_switched")] == [
        "gain exceeds cost",
        "resumed after a switch",
    ]
