"""A run that is ended at any event goes on: nothing is sampled, scored or trained on twice, nothing is lost."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from benchmarks.simulated import SimulatedEngine, SimulatedSender, long_tailed_lengths
from contexts import arena_config, one_rank
from paceline.config import ObjectiveConfig
from paceline.learner.fsdp import FsdpLearner
from paceline.learner.guard import GuardState, Level
from paceline.metrics import JsonlSink, Recorder, read_metrics
from paceline.orchestrator import batch_log
from paceline.orchestrator.intake import PromptStream
from paceline.orchestrator.loop import Parts, train
from paceline.orchestrator.members import Members
from paceline.orchestrator.mismatch import MismatchMonitor
from paceline.orchestrator.recovery import Recovery
from paceline.plan.simulate import SimulatedLearner, simulated_prompts
from paceline.types import Group, PendingGradients, Prompt, RolloutId, RolloutRequest, Sample
from random_policy import make_policy

SETTINGS = [
    "run.steps=6",
    "run.checkpoint_every=2",
    "rollout.prompts_per_step=4",
    "rollout.group_size=2",
    "rollout.engine.max_num_seqs=4",
    "eval.every=0",
]


class ReplayedLearner(SimulatedLearner):
    """Its policy is the list of what it was trained on; its state is that list in a file."""

    policy: list[list[list[Any]]]

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "policy", [])

    async def apply(self, samples: Sequence[Sample], *, pending: PendingGradients | None = None):
        self.policy.append([[str(s.rollout_id), s.token_ids.tolist(), s.logp.tolist(), s.advantage] for s in samples])
        return await super().apply(samples)

    async def save_state(self, path: str) -> None:
        Path(path).mkdir()
        (Path(path) / "policy.json").write_text(json.dumps(self.policy))

    async def load_state(self, path: str) -> None:
        self.policy[:] = json.loads((Path(path) / "policy.json").read_text())


class EndedError(Exception):
    """Stands for a kill: nothing after it is written."""


class Life:
    """One driver of a run, which ends after so many finished rollouts, if at all; if asked to, not before the last
    checkpoint has its name, which it gets beside the next batch."""

    def __init__(
        self,
        directory: Path,
        settings: Sequence[str] = (),
        ends_after: int | None = None,
        learner: Any = None,
        seals: bool = False,
    ) -> None:
        self.directory = directory
        self.config = arena_config([*SETTINGS, *settings])
        self.ends_after, self.seals = ends_after, seals
        self.requests: list[RolloutRequest] = []
        self.scored: list[str] = []
        self.learner: Any = learner or ReplayedLearner()
        self.num_finished = 0

    def run(self) -> bool:
        """Whether it came to the end."""
        self.recovery = Recovery(self.directory, self.config)
        metrics = self.directory / "metrics.jsonl"
        if metrics.is_file():
            self.recovery.drop_records(metrics)
        recorder = Recorder(JsonlSink(metrics))
        try:
            asyncio.run(self._work(recorder))
        except EndedError:
            return False
        finally:
            recorder.close()
        return True

    async def _work(self, recorder: Recorder) -> None:
        life = self

        class Engine(SimulatedEngine):
            async def submit(self, requests: Sequence[RolloutRequest]) -> None:
                life.requests += requests
                await super().submit(requests)

            async def collect(self):
                rollouts = await super().collect()
                life.num_finished += len(rollouts)
                if life.ends_after is not None and life.num_finished > life.ends_after:
                    if life.seals:
                        await life.recovery.finish()
                    raise EndedError
                return rollouts

        engines = [
            Engine(name=f"e{i}", length_of=long_tailed_lengths(0), max_num_seqs=2, seconds_per_token=1e-6)
            for i in range(2)
        ]
        parts = Parts(
            members=Members(engines),
            learner=self.learner,
            sender=SimulatedSender(engines=engines),
            prompts=simulated_prompts(),
            heldout=[],
            score=self._score,
        )
        await train(parts, self.config, recorder, recovery=self.recovery)

    async def _score(self, groups: Sequence[Group]):
        self.scored += [group.prompt.id for group in groups]
        return [[float(len(rollout.token_ids) % 3) for rollout in group.rollouts] for group in groups]


def steps_of(directory: Path) -> list[int]:
    return [record["step"] for record in read_metrics(directory / "metrics.jsonl")["step"]]


@pytest.mark.parametrize("too_old", ["wait", "abort"])
@pytest.mark.parametrize("max_age", [0, 2])
@pytest.mark.parametrize("ends_after", [0, 5, 13, 24, 37, 46])
def test_a_run_that_was_ended_anywhere_samples_scores_and_learns_everything_once(
    tmp_path, ends_after, max_age, too_old
):
    settings = [f"run.max_age={max_age}", f"run.too_old={too_old}", "objective.drop_uniform_groups=false"]
    whole = Life(tmp_path / "whole", settings)
    assert whole.run()
    first = Life(tmp_path / "run", settings, ends_after)
    assert not first.run()
    num_groups = len(list((tmp_path / "run" / "batches").glob("group-*")))
    second = Life(tmp_path / "run", settings)
    assert second.run()
    assert second.recovery.step in (0, 2, 4)
    learned = second.learner.policy
    assert learned[: len(first.learner.policy)] == first.learner.policy, "a step that came again took other groups"
    ids = [RolloutId.parse(name) for batch in learned for name, *_ in batch]
    positions = sorted((one.group_id.number, one.index) for one in ids)
    assert positions == [(group, index) for group in range(24) for index in range(2)]
    if not max_age:  # what finishes first is no chance either
        assert learned == whole.learner.policy
    if too_old == "wait":
        # What had finished together with its group is not sampled again.
        assert len(whole.requests) == 48
        done = max(num_groups, 4 * second.recovery.step)
        assert len({request.id for request in second.requests}) == len(second.requests) <= 48 - 2 * done
    assert steps_of(tmp_path / "run") == [1, 2, 3, 4, 5, 6]
    left = [file.stem for file in (tmp_path / "run" / "batches").glob("step-*")]
    assert sorted(left) == ["step-00000005", "step-00000006"], "the others are covered by both checkpoints"


def test_logged_rollouts_are_learned_from_bit_for_bit_without_engine_or_reward(tmp_path):
    """All batches up to the last are logged: the second driver makes the same policy of them."""
    settings = ["run.checkpoint_every=100"]
    whole = Life(tmp_path / "whole", settings)
    assert whole.run()
    first = Life(tmp_path / "run", settings, ends_after=41)
    assert not first.run()
    assert len(first.learner.policy) == 5
    second = Life(tmp_path / "run", settings)
    assert second.run()
    assert second.recovery.step == 0
    assert second.learner.policy == whole.learner.policy
    assert len(second.scored) == 4, "only the last batch had no rewards yet"


class WholeLearner:
    """The real learner as the loop sees it, in this process."""

    def __init__(self, path: Path) -> None:
        config = one_rank(minibatches=2, microbatch_tokens=2048, learning_rate=1e-3, warmup_steps=9)
        self.inner = FsdpLearner(path, config, ObjectiveConfig(), temperature=1.0, seed=3)

    def __getattr__(self, method: str) -> Any:
        async def call(*arguments: Any, **named: Any) -> Any:
            if method == "counters":
                return {}
            if method == "score":
                return self.inner.score(*arguments, correction=named.get("correction"))
            return getattr(self.inner, method)(*arguments, **named)

        return call

    def finish(self) -> dict[str, bytes]:
        weights = {name: tensor.numpy().tobytes() for name, tensor in self.inner.weights(torch.float32)}
        self.inner.close()
        return weights


def test_the_real_learner_ends_with_the_same_bits_after_two_interruptions(tmp_path):
    model = make_policy(tmp_path / "model")
    settings = ["objective.drop_uniform_groups=false", "run.steps=4"]

    def live(name: str, ends_after: int | None = None) -> tuple[bool, dict[str, bytes]]:
        life = Life(tmp_path / name, settings, ends_after, WholeLearner(model))
        return life.run(), life.learner.finish()

    _, expected = live("whole")
    for ends_after in (13, 9):
        ended, weights = live("run", ends_after)
        assert not ended and weights != expected
    ended, weights = live("run")
    assert ended and weights == expected
    assert steps_of(tmp_path / "run") == [1, 2, 3, 4]


def test_a_damaged_checkpoint_costs_time_and_no_rollout(tmp_path):
    whole = Life(tmp_path / "whole")
    assert whole.run()
    first = Life(tmp_path / "run", ends_after=37, seals=True)
    assert not first.run()
    newest = tmp_path / "run" / "state" / "step-00000004"
    (newest / "learner" / "policy.json").write_text("[]")
    logged = {int(file.name[6:14]) for file in (tmp_path / "run" / "batches").glob("group-*")}
    second = Life(tmp_path / "run")
    assert second.run()
    assert second.recovery.step == 2 and "policy.json differs" in second.recovery.problems[0]
    assert second.learner.policy == whole.learner.policy
    # Batches 3 and 4 come from the log, and so do those groups of batch 5 that had finished.
    assert logged >= set(range(8, 16))
    sampled = sorted((request.group_id.number, request.index) for request in second.requests)
    assert sampled == [(group, index) for group in range(16, 24) if group not in logged for index in range(2)]
    assert (tmp_path / "run" / "state" / "broken-step-00000004").is_dir()


def test_times_go_on_and_the_position_in_the_data_is_kept(tmp_path):
    """Guards against a clock that goes back by the time that the last checkpoint took to write."""

    class WritesSlowly(ReplayedLearner):
        async def save_state(self, path: str) -> None:
            await asyncio.sleep(0.3)  # many times a step
            await super().save_state(path)

    first = Life(tmp_path, ends_after=37, learner=WritesSlowly(), seals=True)
    assert not first.run()
    before = read_metrics(tmp_path / "metrics.jsonl")["step"]
    second = Life(tmp_path)
    assert second.run() and second.recovery.step == 4
    after = read_metrics(tmp_path / "metrics.jsonl")["step"]
    assert after[:4] == before
    assert [record["metrics"]["sync/version"] for record in after] == [1, 2, 3, 4, 5, 6]
    times = [record["time_s"] for record in after]
    assert times == sorted(times) and times[4] >= before[3]["time_s"]


def test_a_run_can_go_on_for_longer(tmp_path):
    assert Life(tmp_path).run()
    longer = Life(tmp_path, ["run.steps=8"])
    assert longer.run()
    assert longer.recovery.step == 6 and len(longer.learner.policy) == 8
    assert steps_of(tmp_path) == list(range(1, 9))


def test_a_run_does_not_go_on_under_another_config(tmp_path):
    assert Life(tmp_path).run()
    with pytest.raises(ValueError, match="config that this run was checkpointed with"):
        Life(tmp_path, ["learner.learning_rate=0.5"]).run()


def test_a_full_disk_costs_the_checkpoint_and_not_the_run(tmp_path, monkeypatch):
    async def full(self, path: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ReplayedLearner, "save_state", full)
    assert Life(tmp_path).run()
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [record["metrics"]["checkpoint/failed"] for record in records["step"]] == [0, 1, 0, 1, 0, 1]
    assert {event["what"] for event in records["event"]} == {"checkpoint_failed"}
    assert list((tmp_path / "state").iterdir()) == []


def test_a_log_that_cannot_be_written_is_reported_at_the_end_of_each_step(tmp_path, monkeypatch):
    def full(file: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(batch_log, "_write_private", full)
    assert Life(tmp_path).run()
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [record["metrics"]["checkpoint/failed"] for record in records["step"]] == [5] * 6, "4 groups and the step"
    events = [(event["what"], event["step"]) for event in records["event"]]
    assert events == [("checkpoint_failed", step) for step in range(1, 7)]


def test_a_logged_reward_is_not_used_for_a_group_that_is_sampled_again(tmp_path):
    """Guards against the reward of a damaged group for other tokens at its position."""
    first = Life(tmp_path, ["run.checkpoint_every=100"], ends_after=21)
    assert not first.run()
    (tmp_path / "batches" / "group-00000002.safetensors").write_bytes(b"damaged")
    second = Life(tmp_path, ["run.checkpoint_every=100"])
    assert second.run()
    assert "simulated/2" in first.scored and second.scored.count("simulated/2") == 1
    assert not {f"simulated/{position}" for position in (0, 1, *range(3, 8))}.intersection(second.scored)


def test_without_checkpoints_nothing_is_kept(tmp_path):
    assert Life(tmp_path, ["run.checkpoint_every=0"]).run()
    assert {entry.name for entry in tmp_path.iterdir()} == {"metrics.jsonl"}


def test_the_guard_remembers_what_it_has_seen(tmp_path):
    """Guards against a guard that learns anew what is normal, on a run that may have gone wrong already."""
    monitor, again = (
        MismatchMonitor(arena_config(SETTINGS), ReplayedLearner(), cast("Any", None), can_raise=True, save_to=None)
        for _ in range(2)
    )
    known = GuardState(past=(0.1, -7.25), num_steps=3, level=Level.MASK, num_pushes=1, raised=True, hold_steps=8)
    monitor._state, monitor._level = known, Level.SKIP
    again.restore(json.loads(json.dumps(monitor.state())))
    assert again._state == known and again._state.level.words == "mask" and again._level is Level.SKIP and again.raised


def numbered(first: int):
    while True:
        yield Prompt(id=f"p{first}", text="", token_ids=np.array([first], np.int32), row={})
        first += 1


def test_a_position_in_other_data_is_refused():
    stream = PromptStream(numbered(0))
    assert stream.peek(3) == [stream.take(), stream.take(), stream.take()]
    state = stream.state()
    again = PromptStream(numbered(0))
    assert [(place, prompt.id) for place, prompt in again.restore(state, {1}).items()] == [(1, "p1")]
    assert [again.take().id, again.take().id] == ["p3", "p4"]
    with pytest.raises(ValueError, match="the data that it began with"):
        PromptStream(numbered(1)).restore(state)
