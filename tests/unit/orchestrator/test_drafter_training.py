"""Drafter training beside a simulated run: devices are leased and given back, and whatever goes wrong costs no
rollout."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.simulated import SimulatedEngine, SimulatedSender, long_tailed_lengths
from contexts import arena_config
from paceline.config import Config
from paceline.drafters.drift import Verdict
from paceline.drafters.rounds import Progress, Rounds, drafter_weights
from paceline.drafters.store import FileStore
from paceline.drafters.worker import documents_in, rounds_in
from paceline.metrics import JsonlSink, Recorder, read_metrics
from paceline.orchestrator import drafter_training
from paceline.orchestrator.drafter_training import OnlineDrafterTraining
from paceline.orchestrator.healing import Healer, Healing
from paceline.orchestrator.loop import Parts, train
from paceline.orchestrator.members import Members, place_of
from paceline.orchestrator.online_drafter import OnlineDrafter
from paceline.plan.simulate import SimulatedLearner, run_virtual, score_by_parity, simulated_prompts
from paceline.types import PendingGradients, Receipt, Rollout, Sample

SETTINGS = [
    "run.steps=6",
    "rollout.prompts_per_step=8",
    "rollout.group_size=4",
    "rollout.engine.max_num_seqs=4",
    "eval.every=0",
    "speculation.drafter.kind=eagle3",
    "speculation.drafter.path=somewhere",
    "speculation.training.mode=idle",
    "speculation.training.round_tokens=200",
]
SLICE_S = 0.05
"""Virtual time in which a simulated trainer makes a state of 100 tokens."""


@dataclass
class SimulatedTrainer:
    """Writes a state every slice while it is leased, and a verdict on the base that it finds."""

    name: str
    exchange: Rounds
    accepted_length: Callable[[int], float] = lambda number: 2.0 + number
    """Accepted length of each base on the held-out slice."""
    crash_after: int | None = None
    """Slices of this life."""
    recall_s: float = 0.0
    """How long the word of its stop is on its way."""
    recall_fails: bool = False
    unleased_cpu_s: float = 0.0
    """What it uses between two leases."""
    finishes_after: int | None = None
    """Slices after which it says that the counted ones are made."""
    start_fails: bool = False
    running: bool = False
    slices: int = 0
    num_starts: int = 0
    log: list[str] = field(default_factory=list)
    end: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self, *, awaited: bool) -> None:
        self.num_starts += 1
        assert awaited == (self.num_starts == 1), "one that is replaced may only start in its leases"
        if self.start_fails:
            raise RuntimeError("no process")
        self.slices = 0
        self.end = asyncio.Event()
        self.log.append("start")

    async def lease(self) -> float:
        self.log.append("lease")
        self.running = True
        asyncio.get_running_loop().call_later(SLICE_S, self._slice, self.end)
        return self.unleased_cpu_s

    async def recall(self) -> None:
        self.log.append("recall")
        if self.recall_fails:
            raise RuntimeError("no signal can be sent")
        await asyncio.sleep(self.recall_s)
        self.running = False

    async def kill(self) -> None:
        self.log.append("kill")
        self.running = False
        self.end.set()

    async def ended(self) -> str:
        await self.end.wait()
        return "exit code -9"

    def _slice(self, life: asyncio.Event) -> None:
        if not self.running or life is not self.end:
            return
        number, published = self.exchange.round(), self.exchange.published()
        if number != published and self.exchange.verdict(number) is None:
            before, after = self.accepted_length(published), self.accepted_length(number)
            self.exchange.put_verdict(number, Verdict(publish=after > before, why="", before=before, after=after))
        tokens = self.exchange.progress(self.name).num_tokens + 100
        finished = 1 if self.slices + 1 == self.finishes_after else self.exchange.progress(self.name).finished_version
        progress = Progress(training_s=tokens / 100 * SLICE_S, num_tokens=tokens, finished_version=finished)
        self.exchange.put_progress(self.name, progress)
        self.exchange.put_state(number, self.name, {"drafter/fc.weight": torch.full((2,), number + 1.0)}, tokens)
        self.slices += 1
        if self.slices == self.crash_after:
            self.running = False
            self.end.set()
        else:
            asyncio.get_running_loop().call_later(SLICE_S, self._slice, life)


@dataclass(slots=True, kw_only=True)
class SpeculatingEngine(SimulatedEngine):
    """Accepts two drafts per verification, as long as the drafter in it is the one that it should have."""

    accepts: bool = True
    breaks: Literal["sleep raises", "wake raises", "wake hangs"] | None = None
    wake_s: float = 0.0

    async def sleep(self) -> None:
        if self.breaks == "sleep raises":
            raise RuntimeError("sleep: unforeseen")

    async def wake(self) -> None:
        if self.breaks == "wake raises":
            raise RuntimeError("wake: unforeseen")
        if self.breaks == "wake hangs":
            await asyncio.Event().wait()
        await asyncio.sleep(self.wake_s)

    async def collect(self) -> Sequence[Rollout]:
        # The base is named: a slotted dataclass is made anew, and `super()` without arguments would not find it.
        found = await SimulatedEngine.collect(self)
        return [
            replace(r, num_verifications=100, num_drafted=300, num_accepted=200 if self.accepts else 0) for r in found
        ]


@dataclass(kw_only=True)
class DrafterWire(SimulatedSender):
    trainers: list[SimulatedTrainer] = field(default_factory=list)
    drafters: list[tuple[int, float]] = field(default_factory=list)
    stopped: int = 0
    loses_drafters: int = 0
    """How many of the pushes leave the engines with a drafter that knows nothing."""
    stale: int = 0
    """In how many of the pushes the last engine is found with a tensor of the drafter before."""
    raises: int = 0
    """How many of the pushes raise what nobody foresaw."""

    async def send(self, version: int) -> Sequence[Receipt]:
        assert not any(trainer.running for trainer in self.trainers), "a sync began while a device was leased"
        return await super().send(version)

    async def send_drafter(self, number: int) -> Sequence[Receipt]:
        assert not any(trainer.running for trainer in self.trainers)
        self.raises -= 1
        if self.raises >= 0:
            raise RuntimeError("push: unforeseen")
        weights = drafter_weights(self.trainers[0].exchange.file(number))
        self.drafters.append((number, float(weights["fc.weight"][0])))
        for engine in self.engines:
            assert isinstance(engine, SpeculatingEngine)
            engine.accepts = len(self.drafters) > self.loses_drafters
        receipts = [
            Receipt(engine=e.name, version=number, num_tensors=1, num_bytes=8, seconds=0.0) for e in self.engines
        ]
        if len(self.drafters) <= self.stale:
            receipts[-1] = replace(receipts[-1], mismatched=("fc.weight",))
        return receipts

    async def stop_speculation(self) -> None:
        self.stopped += 1


@dataclass
class WireRestarter:
    """Starts an engine in a second, with the drafter that the run began with."""

    members: Members
    wire: DrafterWire
    make: Callable[[str], SpeculatingEngine]

    async def beat(self, name: str) -> None:
        await self.members.newest(place_of(name)).pause()

    async def start(self, name: str) -> None:
        await asyncio.sleep(1)
        self.members.register(self.make(name))

    async def catch_up(self, name: str) -> Receipt:
        engine = self.members.newest(place_of(name))
        assert isinstance(engine, SpeculatingEngine)
        engine.policy_version = self.wire.engines[0].policy_version
        engine.accepts = False
        others = [old for old in self.wire.engines if place_of(old.name) != place_of(engine.name)]
        self.wire.engines = [*others, engine]
        self.members.join(engine)
        return Receipt(engine=engine.name, version=0, num_tensors=1, num_bytes=1, seconds=0.0)


class FullStore(FileStore):
    """The disk is full for some of the calls of each method that is named."""

    full: ClassVar[dict[str, int]] = {}

    def _write(self, what: str) -> None:
        if self.full.get(what, 0) > 0:
            self.full[what] -= 1
            raise OSError(errno.ENOSPC, "No space left on device")

    def close_round(self) -> None:
        self._write("close_round")
        super().close_round()

    def publish(self, number: int) -> None:
        self._write("publish")
        super().publish(number)

    def metrics(self) -> Mapping[str, float]:
        self._write("metrics")
        return super().metrics()

    def close(self) -> None:
        super().close()
        self._write("close")


class AloneLearner(SimulatedLearner):
    """Needs the cores of these trainers to itself."""

    trainers: list[SimulatedTrainer]

    async def apply(self, samples: Sequence[Sample], *, pending: PendingGradients | None = None):
        assert not any(trainer.running for trainer in self.trainers), (
            "the policy was updated while a device that it needs was leased"
        )
        return await super().apply(samples)


@dataclass
class Outcome:
    records: dict
    trainers: list[SimulatedTrainer]
    wire: DrafterWire
    seconds: float
    exchange: Rounds
    training: OnlineDrafterTraining


def simulate(
    tmp_path: Path,
    *,
    settings: Sequence[str] = (),
    trains: bool = True,
    loses_drafters: int = 0,
    stale: int = 0,
    apart: Sequence[str] = (),
    learner_s: float = 0.0,
    breaks: Any = None,
    full: Mapping[str, int] | None = None,
    raises: int = 0,
    lose_at_s: float | None = None,
    wake_s: float = 0.0,
    **trainer,
) -> Outcome:
    config: Config = arena_config([*SETTINGS, *settings])
    recorder = Recorder(JsonlSink(tmp_path / "metrics.jsonl"))
    (tmp_path / "drafter").mkdir()
    save_file({"fc.weight": torch.zeros(2)}, tmp_path / "drafter" / "model.safetensors")
    directory = tmp_path / "shared"
    documents_in(directory).mkdir(parents=True)
    (documents_in(directory) / "00000001-0.head").touch()
    exchange = Rounds(rounds_in(directory), tmp_path / "drafter")
    trainers = [SimulatedTrainer(f"engine-{i}", exchange, **trainer) for i in range(2)]
    outcome: list[tuple[DrafterWire, OnlineDrafterTraining]] = []

    async def work() -> None:

        def make(name: str) -> SpeculatingEngine:
            lengths = long_tailed_lengths(0)
            # No two are equally fast: of rollouts that end at the same virtual moment, chance says which is first.
            pace_s = 0.01 if place_of(name) == "engine-0" else 0.01 * 2**0.5 / 1.4
            return SpeculatingEngine(
                name=name, length_of=lengths, max_num_seqs=4, seconds_per_token=pace_s, wake_s=wake_s
            )

        engines = [make(trainer.name) for trainer in trainers]
        engines[0].breaks = breaks
        engines[0].lose_at_s = lose_at_s
        wire = DrafterWire(
            engines=engines, trainers=trainers, loses_drafters=loses_drafters, stale=stale, raises=raises
        )
        learner = AloneLearner(seconds_per_token=learner_s)
        object.__setattr__(learner, "trainers", [trainer for trainer in trainers if trainer.name not in apart])
        assert config.speculation is not None
        members = Members(engines)
        FullStore.full = dict(full or {})
        store = FullStore(directory, tmp_path / "drafter", members.names, config.speculation)
        training = OnlineDrafterTraining(members, trainers, wire, store, config.speculation.training, apart=apart)
        training.keep_in(tmp_path / "kept.safetensors")
        outcome.append((wire, training))
        parts = Parts(
            members=members,
            learner=learner,
            sender=wire,
            prompts=simulated_prompts(),
            heldout=[],
            score=score_by_parity,
            drafter=training if trains else OnlineDrafter(),
            healer=Healer()
            if lose_at_s is None
            else Healing(members, WireRestarter(members, wire, make), max_restarts=1),
        )
        await train(parts, config, recorder)

    _, seconds = run_virtual(work)
    recorder.close()
    ((wire, training),) = outcome
    return Outcome(read_metrics(tmp_path / "metrics.jsonl"), trainers, wire, seconds, exchange, training)


def events(outcome: Outcome, what: str) -> list[dict]:
    return [event for event in outcome.records.get("event", []) if event["what"] == what]


def lengths(outcome: Outcome) -> list[int]:
    return [len(record["length"]) for record in outcome.records["rollouts"]]


def test_idle_engines_train_and_are_back_for_every_update_and_sync(tmp_path: Path) -> None:
    outcome = simulate(tmp_path)  # the wire and the learner assert that nobody trains meanwhile
    assert lengths(outcome) == [32] * 6
    trained = sum(outcome.exchange.progress(trainer.name).num_tokens for trainer in outcome.trainers)
    assert trained > 500
    last = outcome.records["step"][-1]["metrics"]
    assert last["draft/idle_used"] > 0.5
    assert {use for record in outcome.records["places"] for _, use, _, _ in record["spans"]} >= {
        "generate",
        "train",
        "idle",
    }


def test_recalls_are_forgotten_once_they_are_told(tmp_path: Path) -> None:
    """A list of all recalls of a run would grow with its steps."""
    training = simulate(tmp_path).training
    training._journal = cast("Any", SimpleNamespace(places=lambda spans: None))
    training._account().recall_s += [0.5, 0.2]

    async def told_ms() -> list[float]:
        return [training.metrics()["draft/recall_max_ms"] for _ in range(2)]

    assert asyncio.run(told_ms()) == [500.0, 0.0]
    assert training._account().recall_s == []


def test_training_costs_the_run_no_time(tmp_path: Path) -> None:
    (tmp_path / "with").mkdir()
    (tmp_path / "without").mkdir()
    with_training = simulate(tmp_path / "with")
    without = simulate(tmp_path / "without", trains=False)
    assert with_training.seconds == pytest.approx(without.seconds, rel=1e-6)


def test_what_was_judged_better_is_published_once_and_in_order(tmp_path: Path) -> None:
    outcome = simulate(tmp_path)
    published = [number for number, _ in outcome.wire.drafters]
    assert published == sorted(set(published)) and len(published) >= 2
    assert all(weight == number for number, weight in outcome.wire.drafters), "another base was sent than was judged"
    assert [event["round"] for event in events(outcome, "drafter_published")] == published
    kept = load_file(tmp_path / "kept.safetensors")
    assert kept["fc.weight"].tolist() == [float(published[-1])] * 2, (
        "a crash would leave another drafter than the engines have"
    )


@pytest.mark.parametrize("stale", [1, 2])
def test_drafter_that_an_engine_holds_only_in_part_is_pushed_again_and_counts_as_published_only_then(
    stale: int, tmp_path: Path
) -> None:
    """A push that returns without an error may have left a tensor of the drafter before: the fingerprints say so."""
    outcome = simulate(tmp_path, stale=stale)
    failed = events(outcome, "drafter_push_failed")
    assert [(event["engine"], event["why"]) for event in failed] == [("engine-1", "fingerprints differ")] * stale
    first = outcome.wire.drafters[0][0]
    assert outcome.wire.drafters[1][0] == first, "not pushed again"
    published = [event["round"] for event in events(outcome, "drafter_published")]
    assert (first in published) == (stale == 1)
    assert lengths(outcome) == [32] * 6


def test_what_was_judged_worse_is_not_published_and_forgotten(tmp_path: Path) -> None:
    outcome = simulate(tmp_path, accepted_length=lambda number: 2.0 - 0.5 * number)
    assert not outcome.wire.drafters
    assert events(outcome, "drafter_refused")
    newest = drafter_weights(outcome.exchange.file(outcome.exchange.published()))
    assert newest["fc.weight"].tolist() == [0.0, 0.0], "training goes on from what is in the engines"


def test_trainers_that_crash_cost_no_rollout_and_are_not_replaced_for_ever(tmp_path: Path) -> None:
    outcome = simulate(tmp_path, settings=["speculation.training.round_tokens=1000000"], crash_after=1)
    assert lengths(outcome) == [32] * 6
    assert len(events(outcome, "trainer_lost")) >= 4
    assert all(trainer.num_starts <= 4 for trainer in outcome.trainers)
    assert events(outcome, "trainer_given_up")


def total(outcome: Outcome, key: str) -> float:
    return sum(record["metrics"][key] for record in outcome.records["step"])


def test_no_trainer_is_killed_for_a_recall_that_is_slow_on_its_way(tmp_path: Path) -> None:
    """The learner takes the cores, and the message of the recall waits for one: eight of nine trainers were killed,
    with all that they had done."""
    outcome = simulate(tmp_path, recall_s=0.5)
    assert lengths(outcome) == [32] * 6
    assert all(trainer.num_starts == 1 for trainer in outcome.trainers) and not events(outcome, "trainer_lost")
    assert total(outcome, "draft/num_recalls") > 0 and total(outcome, "draft/tokens_trained") > 0
    assert total(outcome, "draft/stall_s") >= 0.5, "what the run waited is not in its metrics"


def test_learner_does_not_wait_until_engines_are_awake(tmp_path: Path) -> None:
    """Nothing waits for an engine at the end of generation: it wakes while the learner works."""
    spent_s = []
    for wake_s in (0.0, 0.3):
        (tmp_path / str(wake_s)).mkdir()
        spent_s.append(simulate(tmp_path / str(wake_s), wake_s=wake_s, learner_s=0.001).seconds)
    assert spent_s[1] == pytest.approx(spent_s[0], rel=1e-3)


def test_what_lending_costs_is_in_the_metrics(tmp_path: Path) -> None:
    outcome = simulate(tmp_path, unleased_cpu_s=0.25)
    assert total(outcome, "draft/unleased_cpu_s") == 0.25 * total(outcome, "draft/num_leases") > 0
    assert total(outcome, "draft/idle_s") >= total(outcome, "draft/leasable_s") > 0


def test_engine_that_cannot_stop_its_trainer_is_lost_and_nobody_waits_for_it(tmp_path: Path) -> None:
    outcome = simulate(tmp_path, settings=["run.steps=2"], recall_fails=True, lose_at_s=1e9)
    assert lengths(outcome) == [32] * 2
    assert any("no signal" in event["why"] for event in events(outcome, "slot_failed"))
    assert all("recall failed" in event["why"] for event in events(outcome, "engine_lost")), "found by a deadline only"
    assert events(outcome, "engine_lost")


def test_lost_drafter_is_pushed_again_and_then_speculation_ends(tmp_path: Path) -> None:
    """Engines whose drafter did not arrive speculate on, accept nothing, and nobody notices but the clock."""
    outcome = simulate(tmp_path, settings=["run.steps=12"], loses_drafters=99)
    assert [event["remedy"] for event in events(outcome, "drafter_lost")] == ["push again", "speculation off"]
    assert outcome.wire.stopped == 1
    assert len({number for number, _ in outcome.wire.drafters}) < len(outcome.wire.drafters), "the same drafter, twice"


def test_drafter_that_arrives_the_second_time_keeps_speculating(tmp_path: Path) -> None:
    outcome = simulate(tmp_path, settings=["run.steps=12"], loses_drafters=1)
    assert [event["remedy"] for event in events(outcome, "drafter_lost")] == ["push again"]
    assert outcome.wire.stopped == 0


def test_inline_mode_trains_after_the_update_for_the_time_that_it_was_given(tmp_path: Path) -> None:
    (tmp_path / "inline").mkdir()
    (tmp_path / "without").mkdir()
    inline = simulate(
        tmp_path / "inline", settings=["speculation.training.mode=inline", "speculation.training.inline_s=0.5"]
    )
    without = simulate(tmp_path / "without", trains=False)
    assert inline.seconds - without.seconds == pytest.approx(6 * 0.5, abs=0.3)
    assert inline.wire.drafters


COUNTED = ["speculation.training.mode=inline", "speculation.training.inline_slices=5"]


def test_counted_inline_training_lasts_until_the_slices_are_made(tmp_path: Path) -> None:
    (tmp_path / "counted").mkdir()
    (tmp_path / "without").mkdir()
    counted = simulate(tmp_path / "counted", settings=COUNTED, finishes_after=40)
    without = simulate(tmp_path / "without", trains=False)
    assert counted.seconds - without.seconds == pytest.approx(40 * SLICE_S, abs=0.3), "once, for the one head there is"
    assert failures(counted) == 0


def test_trainers_that_never_make_their_slices_cost_training_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafter_training, "LEASE_S", 2.0)
    outcome = simulate(tmp_path, settings=COUNTED)
    assert lengths(outcome) == [32] * 6
    assert [event["during"] for event in events(outcome, "drafter_training_given_up")] == ["train_inline"]


def test_with_a_lag_engines_are_awake_for_every_sync(tmp_path: Path) -> None:
    outcome = simulate(tmp_path, settings=["run.max_age=1"])  # the wire asserts it
    assert lengths(outcome) == [32] * 6


def test_an_engine_that_stands_apart_from_the_learner_is_leased_while_that_works(tmp_path: Path) -> None:
    (tmp_path / "apart").mkdir()
    (tmp_path / "beside").mkdir()
    apart = simulate(
        tmp_path / "apart", apart=["engine-1"], learner_s=0.001
    )  # the learner and the wire assert the rest
    beside = simulate(tmp_path / "beside", learner_s=0.001)
    # Not exactly: of rollouts that end at the same virtual moment another may be the first, and take the next slot.
    assert apart.seconds == pytest.approx(beside.seconds, rel=1e-2)
    trained = [outcome.exchange.progress("engine-1").num_tokens for outcome in (apart, beside)]
    assert trained[0] > 1.5 * trained[1]


def failures(outcome: Outcome) -> float:
    return sum(record["metrics"]["draft/failures"] for record in outcome.records["step"])


@pytest.mark.parametrize("what", ["close_round", "metrics"])
def test_full_disk_ends_training_and_not_the_run(what: str, tmp_path: Path) -> None:
    outcome = simulate(tmp_path, full={what: 99})
    assert lengths(outcome) == [32] * 6
    (failed,) = events(outcome, "drafter_training_failed")
    assert failed["during"] == what and "No space left" in failed["why"]
    assert [event["during"] for event in events(outcome, "drafter_training_given_up")] == [what]
    assert failures(outcome) >= 3
    trained = [record["metrics"].get("draft/num_leases", 0.0) for record in outcome.records["step"]]
    assert max(trained) > 0 or what == "metrics"
    assert trained[-1] == 0, "engines are still leased for what cannot be kept"


@pytest.mark.parametrize("what", ["close_round", "publish", "close"])
def test_disk_that_is_full_for_a_moment_costs_one_try(what: str, tmp_path: Path) -> None:
    outcome = simulate(tmp_path, full={what: 1})
    assert lengths(outcome) == [32] * 6
    assert len(events(outcome, "drafter_training_failed")) == 1
    assert not events(outcome, "drafter_training_given_up")
    assert failures(outcome) == (0 if what == "close" else 1)
    assert len(events(outcome, "drafter_published")) >= 2


def test_push_of_a_drafter_that_raises_is_tried_again(tmp_path: Path) -> None:
    outcome = simulate(tmp_path, raises=1)
    assert lengths(outcome) == [32] * 6
    assert failures(outcome) == 1
    assert events(outcome, "drafter_published")[0]["round"] == 1


@pytest.mark.parametrize("breaks", ["sleep raises", "wake raises", "wake hangs"])
def test_engine_that_does_not_come_back_from_a_lease_is_lost_and_nobody_waits_for_it(
    breaks: str, tmp_path: Path
) -> None:
    """The error died with its task, and the loop waited for ever for an engine that nobody would wake."""
    # Inline, so that every engine is leased after the first update.
    outcome = simulate(tmp_path, settings=["speculation.training.mode=inline"], breaks=breaks)
    assert lengths(outcome) == [32] * 6
    (lost,) = events(outcome, "engine_lost")
    assert lost["engine"] == "engine-0"
    assert failures(outcome) == (0 if breaks == "wake hangs" else 1)


def test_trainer_that_cannot_be_started_costs_its_training_only(tmp_path: Path) -> None:
    outcome = simulate(tmp_path, start_fails=True)
    assert lengths(outcome) == [32] * 6
    assert len(events(outcome, "slot_failed")) == 1 and failures(outcome) == 2


def test_engine_that_takes_a_lost_ones_place_is_leased_again_and_gets_the_published_drafter(tmp_path: Path) -> None:
    """Its trainer has died with the lost engine, and it began with the drafter of the run's start."""
    outcome = simulate(tmp_path, settings=["run.steps=12"], lose_at_s=15.0)
    assert lengths(outcome) == [32] * 12
    (back,) = events(outcome, "engine_healed")
    assert back["engine"] == "engine-0#2" and failures(outcome) == 0
    assert outcome.trainers[0].num_starts == 2
    leases_before = outcome.trainers[0].log.index("kill")
    assert "lease" in outcome.trainers[0].log[leases_before:], "its device is idle for the rest of the run"
    engine = next(engine for engine in outcome.wire.engines if engine.name == "engine-0#2")
    assert isinstance(engine, SpeculatingEngine) and engine.accepts, "it drafts with the drafter of the run's start"
    assert not events(outcome, "drafter_lost")
