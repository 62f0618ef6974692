"""The loop over simulated ends: nothing is lost or too old, pushes that fail have consequences."""

import asyncio
import json
import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from benchmarks.simulated import SimulatedEngine, SimulatedSender, long_tailed_lengths
from contexts import arena_config
from paceline.config import Config, CorrectionConfig
from paceline.learner import guard
from paceline.learner.guard import Level
from paceline.metrics import JsonlSink, Recorder, read_metrics
from paceline.orchestrator.fleet import Fleet
from paceline.orchestrator.groups import Sampling
from paceline.orchestrator.journal import Journal
from paceline.orchestrator.loop import Parts, train
from paceline.orchestrator.members import Members
from paceline.orchestrator.mismatch import MismatchMonitor
from paceline.orchestrator.online_drafter import OnlineDrafter
from paceline.plan.simulate import SimulatedLearner, run_virtual, score_by_parity, simulated_prompts
from paceline.types import Group, GroupId, PacelineError, PendingGradients, Receipt, Rollout, Sample, Scores

SMALL = [
    "run.steps=3",
    "rollout.prompts_per_step=8",
    "rollout.group_size=4",
    "rollout.engine.max_num_seqs=4",
    "eval.every=0",
]


class CountingLearner(SimulatedLearner):
    """Remembers what it was trained on."""

    batches: list[list[Sample]]

    def __init__(self, seconds_per_token: float = 0.0) -> None:
        super().__init__(seconds_per_token=seconds_per_token)
        object.__setattr__(self, "batches", [])

    async def apply(self, samples: Sequence[Sample], *, pending: PendingGradients | None = None):
        self.batches.append(list(samples))
        return await super().apply(samples)


def simulate(
    tmp_path,
    config: Config,
    *,
    num_engines=2,
    lose_at_s=None,
    sender=None,
    learner=None,
    score=score_by_parity,
    save_to=None,
    raise_precision=None,
    decode=None,
):
    """One run; returns its records by kind and the learner."""
    path = tmp_path / "metrics.jsonl"
    recorder = Recorder(JsonlSink(path))
    learner = learner or CountingLearner()

    async def work():
        engines = [
            SimulatedEngine(
                name=f"engine-{i}",
                length_of=long_tailed_lengths(config.run.seed),
                max_num_seqs=config.rollout.engine.max_num_seqs,
                seconds_per_token=0.01,
                lose_at_s=lose_at_s if i == 0 else None,
            )
            for i in range(num_engines)
        ]
        wire = (sender or SimulatedSender)(engines=engines)
        parts = Parts(
            members=Members(engines),
            learner=learner,
            sender=wire,
            prompts=simulated_prompts(),
            heldout=list_of_prompts(6),
            score=score,
            raise_precision=raise_precision,
            decode=decode,
        )
        await train(parts, config, recorder, save_to=save_to)

    run_virtual(work)
    recorder.close()
    return read_metrics(path), learner


def list_of_prompts(number: int):
    prompts = simulated_prompts()
    return [next(prompts) for _ in range(number)]


def reward_workers(num_workers: int, seconds: float):
    """A reward that takes `seconds` for each rollout, in `num_workers` processes; and the groups that it scored."""
    scored: list[int] = []

    async def score(groups: Sequence[Group]) -> list[list[float]]:
        return [list(await asyncio.gather(*map(one, group.rollouts))) for group in groups]

    async def one(rollout: Rollout) -> float:
        async with slots:
            await asyncio.sleep(seconds)
            scored.append(rollout.group_id.number)
            return float(rollout.index % 2)

    slots = asyncio.Semaphore(num_workers)
    return score, scored


def test_rewards_are_computed_while_other_groups_are_sampled(tmp_path):
    """Guards against rewards that start after the last group of a batch. With 32 groups of 8 rollouts, 4 workers and
    50 ms, such a loop had a time/prepare of 3.2 s in every step (measured): 256 rewards, 4 at a time."""
    config = arena_config(
        [*SMALL, "rollout.prompts_per_step=32", "rollout.group_size=8", "rollout.engine.max_num_seqs=16"]
    )
    score, scored = reward_workers(4, 0.05)
    records, learner = simulate(tmp_path, config, num_engines=4, score=score)
    steps = [record["metrics"] for record in records["step"]]
    assert max(step["time/prepare"] for step in steps) < 0.05 * 3.2
    assert min(step["time/generation"] for step in steps) > 3.2, "rewards had time to hide behind generation"
    assert [len(batch) for batch in learner.batches] == [256, 256, 256]
    assert len(scored) == 3 * 256 and set(scored) == set(range(96))


def test_a_failed_reward_ends_the_run_and_stops_the_rewards_of_other_groups(tmp_path):
    cancelled: list[int] = []

    async def score(groups: Sequence[Group]) -> list[list[float]]:
        if groups[0].group_id == GroupId(3):
            raise PacelineError("the reward of group 3 failed")
        try:
            return await asyncio.Future()
        except asyncio.CancelledError:
            cancelled.append(groups[0].group_id.number)
            raise

    with pytest.raises(PacelineError, match="group 3"):
        simulate(tmp_path, arena_config(SMALL), score=score)
    assert sorted(cancelled) == [0, 1, 2, 4, 5, 6, 7]


def test_every_rollout_is_trained_on_once(tmp_path):
    records, learner = simulate(tmp_path, arena_config(SMALL))
    assert [len(batch) for batch in learner.batches] == [32, 32, 32]
    assert [len(record["length"]) for record in records["rollouts"]] == [32, 32, 32]
    assert [record["metrics"]["sync/version"] for record in records["step"]] == [1, 2, 3]


def test_failures_that_a_part_counts_are_in_every_steps_record(tmp_path):
    recorder = Recorder(JsonlSink(tmp_path / "counted.jsonl"))
    recorder.counts["reward/failures"] += 2

    async def work():
        journal = Journal(recorder)
        journal.begin_step(1)
        async with Fleet(Members([]), OnlineDrafter(), max_in_flight=1, on_lost=print) as fleet:
            journal.end_step(fleet)

    asyncio.run(work())
    (step,) = read_metrics(tmp_path / "counted.jsonl")["step"]
    assert (step["metrics"]["reward/failures"], step["metrics"]["metrics/records_lost"]) == (2, 0)


def test_engine_that_dies_in_mid_rollout_costs_no_rollout(tmp_path):
    records, learner = simulate(tmp_path, arena_config(SMALL), lose_at_s=0.9)
    assert [len(batch) for batch in learner.batches] == [32, 32, 32]
    (lost,) = [event for event in records["event"] if event["what"] == "engine_lost"]
    assert lost["engine"] == "engine-0" and lost["redispatched"] > 0
    assert records["step"][-1]["metrics"]["fleet/engines"] == 1
    assert set(records["rollouts"][-1]["engines"]) == {"engine-1"}


def test_loss_of_every_engine_ends_the_run_instead_of_waiting_for_ever(tmp_path):
    with pytest.raises(PacelineError, match="every engine is lost"):
        simulate(tmp_path, arena_config(SMALL), num_engines=1, lose_at_s=0.9)


@pytest.mark.parametrize("max_age", [0, 1, 2])
def test_rollouts_are_never_older_than_allowed(tmp_path, max_age):
    config = arena_config([*SMALL, "run.steps=8", f"run.max_age={max_age}"])
    records, learner = simulate(tmp_path, config, learner=CountingLearner(seconds_per_token=0.001))
    assert len(learner.batches) == 8
    ages = [
        step - 1 - sample.version_spans[0][0] for step, batch in enumerate(learner.batches, start=1) for sample in batch
    ]
    assert max(ages) == max_age
    steps = [record["metrics"] for record in records["step"]]
    assert max(step["rollout/age_max"] for step in steps) == max_age and steps[0]["rollout/age_max"] == 0
    assert all(step["rollout/age_mean"] <= step["rollout/age_max"] for step in steps)
    assert {step["rollout/max_age_exceeded"] for step in steps} == {0}


def test_asynchronous_training_hides_the_learner_behind_generation(tmp_path):
    times = {}
    for max_age in (0, 1):
        config = arena_config([*SMALL, "run.steps=8", f"run.max_age={max_age}"])
        records, _ = simulate(tmp_path / str(max_age), config, learner=CountingLearner(seconds_per_token=0.001))
        times[max_age] = records["step"][-1]["time_s"]
    assert times[1] < 0.8 * times[0]


class RefusingSender(SimulatedSender):
    """Refuses version 1 on engine-0: once, or for ever."""

    tries = 0
    refusals = 1

    async def send(self, version: int):
        receipts = list(await super().send(version))
        if version == 1 and self.tries < self.refusals:
            self.tries += 1
            receipts[0] = Receipt(engine="engine-0", version=1, num_tensors=1, num_bytes=1, seconds=0.0, error="w: NaN")
        return receipts


class StubbornSender(RefusingSender):
    refusals = 99


def test_push_that_was_refused_is_tried_again(tmp_path):
    records, _ = simulate(tmp_path, arena_config(SMALL), sender=RefusingSender)
    assert [event["why"] for event in records["event"]] == ["w: NaN"]
    assert records["step"][-1]["metrics"]["fleet/engines"] == 2


def test_engine_that_refuses_twice_is_not_used_with_an_old_policy(tmp_path):
    records, learner = simulate(tmp_path, arena_config(SMALL), sender=StubbornSender)
    assert [event["what"] for event in records["event"]] == ["push_failed", "push_failed", "engine_lost"]
    assert len(learner.batches) == 3
    assert set(records["rollouts"][-1]["engines"]) == {"engine-1"}


def test_batch_without_gradient_is_skipped_not_trained_on(tmp_path):
    async def all_equal(groups: Sequence[Group]):
        return [[1.0] * len(group.rollouts) for group in groups]

    records, learner = simulate(tmp_path, arena_config(SMALL), score=all_equal)
    assert learner.batches == []
    assert [event["what"] for event in records["event"]] == ["update_skipped"] * 3


def test_group_with_a_failed_reward_is_not_trained_on_and_not_part_of_a_mean(tmp_path):
    async def one_fails(groups: Sequence[Group]):
        rewards = await score_by_parity(groups)
        for group, of_group in zip(groups, rewards, strict=True):
            if int(group.prompt.id.removeprefix("simulated/")) % 8 == 0:
                of_group[0] = math.nan
        return rewards

    config = arena_config([*SMALL, "eval.every=3", "eval.num_prompts=6", "eval.samples_per_prompt=2"])
    records, learner = simulate(tmp_path, config, score=one_fails)
    assert [len(batch) for batch in learner.batches] == [32 - config.rollout.group_size] * 3
    assert all(math.isfinite(sample.advantage) for batch in learner.batches for sample in batch)
    assert all(math.isfinite(record["metrics"]["reward/mean"]) for record in records["step"])
    assert {record["metrics"]["policy/groups_kept_share"] for record in records["step"]} == {7 / 8}
    assert [round(record["metrics"]["eval/accuracy"], 3) for record in records["eval"]] == [round(6 / 11, 3)] * 2


def test_evaluation_does_not_mix_with_training_rollouts(tmp_path):
    config = arena_config([*SMALL, "run.max_age=1", "eval.every=2", "eval.num_prompts=6", "eval.samples_per_prompt=2"])
    records, learner = simulate(tmp_path, config)
    assert [record["step"] for record in records["eval"]] == [0, 2, 3]
    assert all(record["metrics"]["eval/accuracy"] == 0.5 for record in records["eval"])
    assert [len(batch) for batch in learner.batches] == [32, 32, 32]


def test_an_unforeseen_error_of_an_engine_reaches_the_one_who_waits():
    class Broken(SimulatedEngine):
        async def collect(self):
            raise RuntimeError("unforeseen")

    async def work():
        engine = Broken(name="engine-0", length_of=lambda r: 1, max_num_seqs=1, seconds_per_token=0.01)
        async with Fleet(Members([engine]), OnlineDrafter(), max_in_flight=1, on_lost=lambda *_: None) as fleet:
            await fleet.open(list_of_prompts(1), Sampling(group_size=1, temperature=1.0, max_tokens=4)).wait()

    with pytest.raises(RuntimeError, match="unforeseen"):
        run_virtual(work)


def test_a_lost_engine_is_closed_because_a_frozen_one_still_holds_memory():
    closed = []

    class Closing(SimulatedEngine):
        async def close(self):
            closed.append(self.name)

    async def work():
        engines = [
            Closing(
                name=f"e{i}",
                length_of=lambda r: 5,
                max_num_seqs=8,
                seconds_per_token=0.01,
                lose_at_s=0.02 if i == 0 else None,
            )
            for i in range(2)
        ]
        async with Fleet(Members(engines), OnlineDrafter(), max_in_flight=8, on_lost=lambda *_: None) as fleet:
            await fleet.open(list_of_prompts(4), Sampling(group_size=2, temperature=1.0, max_tokens=9)).wait()

    run_virtual(work)
    assert closed == ["e0"]


def test_least_loaded_engine_gets_the_next_rollout():
    async def work():
        counts = {}
        engines = [
            SimulatedEngine(name=f"e{i}", length_of=lambda r: 5, max_num_seqs=8, seconds_per_token=0.01)
            for i in range(3)
        ]
        async with Fleet(Members(engines), OnlineDrafter(), max_in_flight=8, on_lost=lambda *_: None) as fleet:
            groups = await fleet.open(list_of_prompts(6), Sampling(group_size=2, temperature=1.0, max_tokens=9)).wait()
        for group in groups:
            for rollout in group.rollouts:
                counts[rollout.engine] = counts.get(rollout.engine, 0) + 1
        return counts

    counts, seconds = run_virtual(work)
    assert counts == {"e0": 4, "e1": 4, "e2": 4}
    assert seconds == pytest.approx(0.05)


def test_what_the_fleet_remembers_of_loads_does_not_grow_with_the_run():
    async def work():
        engines = [
            SimulatedEngine(name=f"e{i}", length_of=lambda r: 5, max_num_seqs=8, seconds_per_token=0.01)
            for i in range(3)
        ]
        sampling, sizes = Sampling(group_size=2, temperature=1.0, max_tokens=9), []
        async with Fleet(Members(engines), OnlineDrafter(), max_in_flight=8, on_lost=lambda *_: None) as fleet:
            for _ in range(300):
                await fleet.open(list_of_prompts(2), sampling).wait()
                sizes.append(len(fleet._loads))
        return sizes

    sizes, _ = run_virtual(work)
    assert max(sizes[150:]) <= max(sizes[:150]) < 100


def test_virtual_clock_reports_a_deadlock_instead_of_hanging():
    async def work():
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="never happen"):
        run_virtual(work)


def test_metrics_file_is_one_json_object_a_line(tmp_path):
    simulate(tmp_path, arena_config(SMALL))
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert kinds.count("step") == 3


class DoubtingLearner(CountingLearner):
    """Disagrees with one engine, or with all, from one step to another: by a fixed gap, or by NaN on the engine's
    side."""

    def __init__(self, gap: float, *, engines: Sequence[str], steps: range) -> None:
        super().__init__()
        self.gap, self.suspects, self.steps, self.num_passes = gap, engines, steps, 0
        self.num_discarded = 0

    async def discard(self) -> None:
        self.num_discarded += 1

    async def score(
        self, samples: Sequence[Sample], *, correction: CorrectionConfig | None = None, hand_over: bool = False
    ) -> Scores:
        if not hand_over:
            return await super().score(samples)
        self.num_passes += 1
        random = np.random.default_rng(self.num_passes)
        bad = self.num_passes in self.steps
        return Scores(
            logp=[
                sample.logp
                + random.normal(0, 0.01, len(sample.logp)).astype(np.float32)
                + np.float32(self.gap if bad and sample.engine in self.suspects else 0)
                for sample in samples
            ]
        )


GUARDED = [*SMALL, "run.steps=9", "guard.mode=act"]


@pytest.fixture(autouse=True)
def quick_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "CALIBRATION_STEPS", 3)
    monkeypatch.setattr(guard, "HOLD_STEPS", 2)


def test_a_broken_sync_costs_one_batch_and_is_pushed_again(tmp_path):
    learner = DoubtingLearner(0.3, engines=["engine-0"], steps=range(6, 7))
    records, _ = simulate(tmp_path, arena_config(GUARDED), learner=learner)
    assert len(learner.batches) == 8 and learner.num_discarded == 1
    assert [record["metrics"]["sync/version"] for record in records["step"]] == [1, 2, 3, 4, 5, 5, 6, 7, 8]
    assert [record["metrics"]["guard/level"] for record in records["step"]] == [0, 0, 0, 0, 0, 4, 0, 0, 0]
    told = [event for event in records["event"] if event["what"] == "guard"]
    assert [(event["level"], event["cause"], event["engines"]) for event in told] == [
        ("skip", "sync", ["engine-0"]),
        ("observe", "none", []),
    ]
    assert records["mismatch"][5]["worst"][0]["engine"] == "engine-0"


class ToldLearner(DoubtingLearner):
    """Records the correction of each scoring, and whether its gradients were applied."""

    def __init__(self, gap: float, *, engines: Sequence[str], steps: range) -> None:
        super().__init__(gap, engines=engines, steps=steps)
        self.expected: list[str] = []
        self.reused: list[bool] = []

    async def score(
        self, samples: Sequence[Sample], *, correction: CorrectionConfig | None = None, hand_over: bool = False
    ) -> Scores:
        scores = await super().score(samples, hand_over=hand_over)
        if not hand_over:
            return scores
        assert correction is not None
        self.expected.append(correction.kind)
        pending = PendingGradients(id=self.num_passes, correction=correction)
        return Scores(logp=scores.logp, pending=pending)

    async def apply(self, samples: Sequence[Sample], *, pending: PendingGradients | None = None):
        self.reused.append(pending is not None and pending.id == self.num_passes)
        return await super().apply(samples)


@pytest.mark.parametrize("mode", ["act", "observe"])
def test_gradients_are_computed_for_the_guards_last_correction_and_reused_if_it_stays(tmp_path, mode):
    learner = ToldLearner(0.1, engines=["engine-0", "engine-1"], steps=range(4, 8))
    records, _ = simulate(tmp_path, arena_config([*GUARDED, f"guard.mode={mode}"]), learner=learner)
    levels = [0, *(step["metrics"]["guard/level"] for step in records["step"])]
    assert 2 in levels
    kinds = ["token-mis" if mode == "act" and level == 2 else "none" for level in levels]
    assert learner.expected == kinds[:-1]
    assert learner.reused == [expected == decided for expected, decided in pairwise(kinds)]
    assert learner.reused.count(False) == (2 if mode == "act" else 0)


class MovedLearner(CountingLearner):
    """Every update moves the probability of every token far; with a little noise besides. One engine is told to have
    other weights from some step on."""

    broken_from: int

    def __init__(self, broken_from: int = 99) -> None:
        super().__init__()
        object.__setattr__(self, "broken_from", broken_from)

    async def score(
        self, samples: Sequence[Sample], *, correction: CorrectionConfig | None = None, hand_over: bool = False
    ) -> Scores:
        if not hand_over:
            return await super().score(samples)
        version, random = len(self.batches), np.random.default_rng(len(self.batches))
        found = []
        for sample in samples:
            spans = sample.version_spans
            ages = version - np.repeat([drawn for drawn, _ in spans], [num for _, num in spans])
            broken = version >= self.broken_from and sample.engine == "engine-0"
            gaps = 0.7 * ages + random.normal(0, 0.01, len(ages)) + (0.5 if broken else 0.0)
            found.append(sample.logp + gaps.astype(np.float32))
        return Scores(logp=found)


def test_engines_are_not_blamed_for_tokens_that_an_older_policy_has_drawn(tmp_path):
    """What the updates since then have moved would look like a broken sync, and the batch would be skipped."""
    config = arena_config([*GUARDED, "run.max_age=2"])
    records, learner = simulate(tmp_path, config, learner=MovedLearner())
    steps = [record["metrics"] for record in records["step"]]
    assert len(learner.batches) == 9 and {step["guard/level"] for step in steps} == {0}
    assert max(step["mismatch/k3"] for step in steps) < 1e-3
    assert min(step["mismatch/judged_share"] for step in steps) < 0.5
    assert min(step["mismatch/older_k3"] for step in steps if "mismatch/older_k3" in step) > 0.1


def test_a_broken_sync_is_found_among_older_tokens(tmp_path):
    config = arena_config([*GUARDED, "run.max_age=1", "run.steps=7"])
    records, _ = simulate(tmp_path, config, learner=MovedLearner(broken_from=5))
    (first, *_) = [event for event in records["event"] if event["what"] == "guard"]
    assert (first["step"], first["level"], first["cause"], first["engines"]) == (6, "skip", "sync", ["engine-0"])


def test_a_number_that_is_not_finite_counts_at_any_age(tmp_path):
    config = arena_config([*SMALL, "guard.mode=act"])

    async def work():
        journal = Journal(Recorder(JsonlSink(tmp_path / "metrics.jsonl")))
        monitor = MismatchMonitor(config, CountingLearner(), journal, can_raise=False, save_to=None)
        old = Sample(
            token_ids=np.zeros(12, np.int32),
            num_prompt_tokens=2,
            logp=np.full(10, np.nan, np.float32),
            advantage=1.0,
            version_spans=((3, 10),),
            engine="engine-0",
        )
        return await monitor.judge([old], Scores(logp=[np.zeros(10, np.float32)]), version=4)

    decision = run_virtual(work)[0].decision
    assert (decision.level, decision.engines) == (Level.SKIP, ("engine-0",))


def test_a_guard_that_only_observes_changes_nothing(tmp_path):
    learner = DoubtingLearner(0.3, engines=["engine-0"], steps=range(6, 7))
    records, _ = simulate(tmp_path, arena_config([*GUARDED, "guard.mode=observe"]), learner=learner)
    assert len(learner.batches) == 9
    assert records["step"][5]["metrics"]["guard/level"] == 4
    assert all(sample.weight is None and sample.old_logp is None for batch in learner.batches for sample in batch)


def test_noise_is_masked_while_it_lasts(tmp_path):
    learner = DoubtingLearner(0.2, engines=["engine-0", "engine-1"], steps=range(6, 7))
    simulate(tmp_path, arena_config(GUARDED), learner=learner)
    weights = [batch[0].weight for batch in learner.batches]
    assert [weight is not None for weight in weights] == [False] * 5 + [True] + [False] * 3


def test_a_fault_that_stays_stops_the_run_with_its_batch(tmp_path):
    learner = DoubtingLearner(0.3, engines=["engine-0"], steps=range(6, 99))
    with pytest.raises(PacelineError, match=r"stopped-step-8/batch\.npz"):
        simulate(tmp_path, arena_config(GUARDED), learner=learner, save_to=str(tmp_path / "policy"))
    with np.load(tmp_path / "stopped-step-8" / "batch.npz", allow_pickle=False) as saved:
        assert set(saved["engine"]) == {"engine-0", "engine-1"}
    assert len(learner.batches) == 5, "nothing was learned from a broken engine"


def test_precision_is_raised_and_lowered_by_the_hook(tmp_path):
    asked: list[bool] = []

    async def raise_precision(raised: bool) -> None:
        asked.append(raised)

    learner = DoubtingLearner(0.3, engines=["engine-0", "engine-1"], steps=range(5, 7))
    records, _ = simulate(tmp_path, arena_config(GUARDED), learner=learner, raise_precision=raise_precision)
    assert asked == [True, False]
    assert [record["metrics"]["guard/raised"] for record in records["step"]] == [0, 0, 0, 0, 0, 1, 1, 0, 0]


def test_the_learner_against_itself_is_measured_on_few_tokens(tmp_path):
    """Its floor stands beside the mismatch, and costs next to nothing."""
    seen: list[int] = []

    class Remembering(CountingLearner):
        async def score(
            self, samples: Sequence[Sample], *, correction: CorrectionConfig | None = None, hand_over: bool = False
        ) -> Scores:
            if hand_over:
                return await super().score(samples)
            seen.append(len(samples))
            return Scores(logp=[sample.logp + np.float32(0.001) for sample in samples])

    records, _ = simulate(tmp_path, arena_config(SMALL), learner=Remembering())
    assert all(1 <= number <= 4 for number in seen) and len(seen) == 3
    assert records["step"][0]["metrics"]["mismatch/floor_k3"] == pytest.approx(5e-7, rel=0.01)


class CalibratedLearner(CountingLearner):
    """Remembers what it was calibrated on, as which version."""

    calls: list
    qk_norm: bool

    def __init__(self, *, qk_norm: bool) -> None:
        super().__init__()
        object.__setattr__(self, "calls", [])
        object.__setattr__(self, "qk_norm", qk_norm)

    async def apply(self, samples: Sequence[Sample], *, pending: PendingGradients | None = None):
        self.calls.append("update")
        return await super().apply(samples)

    async def calibrate(self, samples: Sequence[Sample], version: int):
        self.calls.append((version, sum(sample.num_response_tokens > 0 for sample in samples), len(samples)))
        return {"precision/qk_norm": float(self.qk_norm), "precision/underflow_share": 0.25}


@pytest.mark.parametrize("qk_norm", [True, False])
def test_scales_are_calibrated_after_every_update_and_before_the_first_batch(tmp_path, qk_norm):
    """Calibrated before the update they would be the old policy's; and version 0 needs some too."""
    config = arena_config([*SMALL, "rollout.engine.kv_cache=fp8"])
    records, learner = simulate(tmp_path, config, learner=CalibratedLearner(qk_norm=qk_norm))
    assert learner.calls == [(0, 0, 8), "update", (1, 32, 32), "update", (2, 32, 32), "update", (3, 32, 32)]
    assert [len(batch) for batch in learner.batches] == [32, 32, 32], (
        "prompts that were calibrated on are sampled as well"
    )
    assert records["step"][-1]["metrics"]["precision/underflow_share"] == 0.25
    warnings = [event for event in records.get("event", []) if event["what"] == "fp8_kv_cache_without_qk_norm"]
    assert [event["underflow_share"] for event in warnings] == ([] if qk_norm else [0.25])


def test_engines_in_full_precision_are_not_calibrated(tmp_path):
    _, learner = simulate(tmp_path, arena_config(SMALL), learner=CalibratedLearner(qk_norm=True))
    assert learner.calls == ["update"] * 3


async def score_by_length(groups: Sequence[Group]) -> list[list[float]]:
    return [[float(len(rollout.token_ids)) for rollout in group.rollouts] for group in groups]


def test_an_evaluation_shows_its_best_its_middle_and_its_worst_answer(tmp_path):
    settings = [*SMALL, "eval.every=2", "eval.num_prompts=5", "run.steps=3"]
    records, _ = simulate(tmp_path, arena_config(settings), score=score_by_length, decode=lambda ids: "x" * len(ids))
    assert [record["step"] for record in records["texts"]] == [0, 2, 3]
    heldout = {prompt.id: prompt.text for prompt in list_of_prompts(5)}
    for record, evaluation in zip(records["texts"], records["eval"], strict=True):
        rewards = {text["which"]: text["reward"] for text in record["texts"]}
        assert list(rewards) == ["best", "middle", "worst"] and rewards["best"] > rewards["middle"] > rewards["worst"]
        assert rewards["worst"] < evaluation["metrics"]["eval/accuracy"] < rewards["best"]
        for text in record["texts"]:
            assert text["prompt"] == heldout[text["prompt_id"]]
            assert text["completion"] == "x" * int(text["reward"]), "another's reward or answer"


def test_an_evaluation_of_one_answer_shows_it_once(tmp_path):
    config = arena_config([*SMALL, "eval.every=3", "eval.num_prompts=1", "eval.samples_per_prompt=1"])
    records, _ = simulate(tmp_path, config, decode=lambda ids: "said")
    assert [len(record["texts"]) for record in records["texts"]] == [1, 1]


def test_a_long_answer_is_recorded_with_its_beginning_and_its_end(tmp_path):
    """Its end is what a reward looks at; all of it, at every evaluation, would be a file that nobody opens."""
    config = arena_config([*SMALL, "eval.every=3", "eval.num_prompts=1", "eval.samples_per_prompt=1"])
    records, _ = simulate(tmp_path, config, decode=lambda ids: "begin" + 30_000 * "-" + "#### 42")
    completion = records["texts"][0]["texts"][0]["completion"]
    assert completion.startswith("begin-") and completion.endswith("-#### 42") and len(completion) < 2100
    assert "28,012 characters omitted" in completion


def test_without_a_tokenizer_no_texts_are_recorded(tmp_path):
    records, _ = simulate(tmp_path, arena_config([*SMALL, "eval.every=3"]))
    assert len(records["eval"]) == 2 and "texts" not in records
