"""Failures planted in the hand-over of hidden states and in the drafter's buffer are found in metrics.jsonl by name."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.simulated import SimulatedEngine, SimulatedSender
from contexts import arena_config, one_rank
from drafter_cases import make_documents, make_drafter, make_head
from paceline.config import (
    BufferConfig,
    CorrectionConfig,
    DrafterTrainingConfig,
    EagleDrafter,
    ObjectiveConfig,
    SpeculationConfig,
)
from paceline.drafters.buffer import Buffer
from paceline.drafters.checkpoint import save
from paceline.drafters.store import FileStore
from paceline.drafters.worker import TrainingWorker, WorkerSettings, documents_in
from paceline.learner.fsdp import FsdpLearner
from paceline.learner.hidden_states import HiddenStateWriter, HiddenStateWriterSettings
from paceline.metrics import JsonlSink, Recorder, read_metrics
from paceline.orchestrator.loop import Parts, train
from paceline.orchestrator.members import Members
from paceline.orchestrator.online_drafter import OnlineDrafter
from paceline.plan.simulate import SimulatedLearner, run_virtual, score_by_parity, simulated_prompts
from paceline.types import Learner, Sample, Scores
from random_policy import make_policy

SETTINGS = ["run.steps=2", "rollout.prompts_per_step=2", "rollout.group_size=2", "eval.every=0"]


def run(tmp_path: Path, *, learner: Learner, drafter: OnlineDrafter) -> list[dict[str, float]]:
    """The metrics of each step."""
    path = tmp_path / "metrics.jsonl"

    async def work() -> None:
        engine = SimulatedEngine(name="a", length_of=lambda request: 5, max_num_seqs=4, seconds_per_token=0.01)
        parts = Parts(
            members=Members([engine]),
            learner=learner,
            sender=SimulatedSender(engines=[engine]),
            prompts=simulated_prompts(),
            heldout=[],
            score=score_by_parity,
            drafter=drafter,
        )
        await train(parts, arena_config(SETTINGS), Recorder(JsonlSink(path)))

    run_virtual(work)
    return [record["metrics"] for record in read_metrics(path)["step"]]


class WritingLearner(SimulatedLearner):
    """Scores with a real policy, whose hidden states it writes."""

    writer: HiddenStateWriter

    async def score(
        self, samples: Sequence[Sample], *, correction: CorrectionConfig | None = None, hand_over: bool = False
    ) -> Scores:
        if not hand_over:
            return Scores(logp=[sample.logp for sample in samples])
        return Scores(logp=self.writer.score(samples).logp)

    async def counters(self) -> Mapping[str, float]:
        return self.writer.counters()


def test_hand_over_that_fails_is_in_metrics_jsonl(tmp_path: Path) -> None:
    policy = FsdpLearner(
        make_policy(tmp_path / "policy", hidden_size=64), one_rank(), ObjectiveConfig(), temperature=1.0, seed=0
    )
    try:
        settings = HiddenStateWriterSettings(directory=tmp_path / "buffer", taps=(0, 1, 2), buffer=BufferConfig())
        writer = HiddenStateWriter(policy, settings, rank=0, seed=0)
        shutil.rmtree(tmp_path / "buffer")  # planted: nothing can be written
        learner = WritingLearner()
        object.__setattr__(learner, "writer", writer)
        steps = run(tmp_path, learner=learner, drafter=OnlineDrafter())
    finally:
        policy.close()
    assert [metrics["draft/hand_over_failures"] for metrics in steps] == [1.0, 1.0]


class StoreOnly(OnlineDrafter):
    """Trains nothing, and tells what the store counts."""

    def __init__(self, store: FileStore) -> None:
        self._store = store

    def metrics(self) -> Mapping[str, float]:
        return self._store.metrics()


def test_broken_document_is_in_metrics_jsonl(tmp_path: Path) -> None:
    save(make_drafter(), tmp_path / "drafter")
    training = DrafterTrainingConfig(mode="idle", tokens_per_step=10_000, buffer=BufferConfig(heldout_share=1e-6))
    directory = tmp_path / "shared"
    buffer = Buffer(documents_in(directory), training.buffer, writer="test")
    buffer.put(make_documents([(4, 20), (3, 30)], seed=1), 1)
    buffer.put_head(make_head().numpy(), 1)
    np.zeros(3, np.int32).tofile(buffer.entries()[0].file)  # planted: a document that is not whole
    settings = WorkerSettings(
        name="a",
        drafter=tmp_path / "drafter",
        directory=directory,
        max_draft_length=3,
        training=training,
        cpus=None,
        seed=0,
    )
    with torch.random.fork_rng():
        assert TrainingWorker(settings).work()
    speculation = SpeculationConfig(drafter=EagleDrafter(path=str(tmp_path / "drafter")), training=training)
    store = FileStore(directory, tmp_path / "drafter", ["a"], speculation)
    steps = run(tmp_path, learner=SimulatedLearner(), drafter=StoreOnly(store))
    assert [metrics["draft/broken_buffer_files"] for metrics in steps] == [1.0, 1.0]
