"""The training process: what it does with its time, and that a signal takes the time away at once."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch

from drafter_cases import make_documents, make_drafter, make_head
from paceline.config import BufferConfig, DrafterTrainingConfig
from paceline.drafters.buffer import Buffer
from paceline.drafters.checkpoint import save
from paceline.drafters.rounds import Rounds
from paceline.drafters.worker import TrainerProcess, TrainingWorker, WorkerSettings, documents_in, rounds_in

LENGTHS = [(4, 20), (3, 30), (5, 12)] * 20


@pytest.fixture
def settings(tmp_path: Path) -> WorkerSettings:
    save(make_drafter(), tmp_path / "drafter")
    training = DrafterTrainingConfig(
        mode="idle",
        tokens_per_step=200,
        round_tokens=800,
        buffer=BufferConfig(heldout_share=0.3),
    )
    return WorkerSettings(
        name="a",
        drafter=tmp_path / "drafter",
        directory=tmp_path / "run",
        max_draft_length=3,
        training=training,
        cpus=tuple(sorted(os.sched_getaffinity(0))[:1]),
        seed=0,
    )


def fill(settings: WorkerSettings, version: int = 1) -> None:
    buffer = Buffer(documents_in(settings.directory), settings.training.buffer, writer="test")
    buffer.put(make_documents(LENGTHS, seed=version), version)
    buffer.put_head(make_head().numpy(), version)


def rounds_of(settings: WorkerSettings) -> Rounds:
    return Rounds(rounds_in(settings.directory), settings.drafter)


def test_without_documents_there_is_nothing_to_do(settings: WorkerSettings) -> None:
    assert not TrainingWorker(settings).work()


def test_training_makes_a_better_drafter_which_is_then_judged_so(settings: WorkerSettings) -> None:
    fill(settings)
    worker, rounds = TrainingWorker(settings), rounds_of(settings)
    while rounds.fresh_tokens() < 8000:
        assert worker.work()
    rounds.close_round()
    assert worker.work()
    verdict = rounds.verdict(1)
    assert verdict is not None and verdict.publish and verdict.after > verdict.before
    assert rounds.progress("a").num_tokens >= 8000 and rounds.progress("a").training_s > 0


def test_a_drafter_that_got_worse_is_judged_so(settings: WorkerSettings) -> None:
    """Planted: a base of noise in place of what was trained. Published, it would cost every rollout until the next
    update."""
    fill(settings)
    worker, rounds = TrainingWorker(settings), rounds_of(settings)
    worker.work()
    noise = {name: torch.randn(weight.shape) * 3 for name, weight in rounds.base(0).items()}
    rounds.put_state(0, "b", noise, 10**9)
    rounds.close_round()
    assert worker.work()
    verdict = rounds.verdict(1)
    assert verdict is not None and not verdict.publish and verdict.after < verdict.before


def test_workers_go_on_from_the_newest_base(settings: WorkerSettings) -> None:
    fill(settings)
    rounds = rounds_of(settings)
    first, second = TrainingWorker(settings), TrainingWorker(settings.model_copy(update={"name": "b"}))
    first.work()
    second.work()
    mean = rounds.close_round()
    rounds.publish(mean)  # nothing to judge
    first.work()
    moved = rounds.base(mean)
    trained = rounds.close_round()
    differences = [
        float((rounds.base(trained)[name] - moved[name]).norm() / moved[name].norm())
        for name in moved
        if name.startswith("drafter/layers") and moved[name].ndim == 2
    ]
    assert 0 < max(differences) < 0.2, "one step from the mean, not from where this worker was"


def counted(settings: WorkerSettings, directory: Path) -> WorkerSettings:
    """Two slices for each version of the policy, of which the buffer holds the newest."""
    training = settings.training.model_dump() | {"mode": "inline", "inline_slices": 2}
    training["buffer"]["keep_versions"] = 1
    changes = {"training": DrafterTrainingConfig.model_validate(training), "directory": directory}
    return settings.model_copy(update=changes)


def test_counted_slices_are_made_once_for_each_version_of_the_policy(settings: WorkerSettings, tmp_path: Path) -> None:
    settings = counted(settings, tmp_path / "run")
    worker, rounds = TrainingWorker(settings), rounds_of(settings)
    for version in (1, 2):
        fill(settings, version)
        assert [worker.work() for _ in range(5)] == [True, True, False, False, False]
        assert rounds.progress("a").finished_version == version
    assert rounds.state(0, "a")[0]["num_steps"] == 4
    rounds.close_round()
    fill(settings, 3)
    assert [worker.work() for _ in range(5)] == [True, True, True, False, False], "a verdict is no slice"


def test_a_worker_of_a_resumed_run_makes_the_same_bits(settings: WorkerSettings, tmp_path: Path) -> None:
    """Guards against random numbers that depend on how long the process lives, and against a round, its optimizer or
    its tokens that begin anew."""
    settings, resumed = counted(settings, tmp_path / "run"), counted(settings, tmp_path / "resumed")
    worker, rounds = TrainingWorker(settings), rounds_of(settings)
    fill(settings, 1)
    while worker.work():
        pass
    rounds.copy_to(tmp_path / "kept")
    rounds_of(resumed).copy_from(tmp_path / "kept")
    found = []
    for case, its_worker in ((settings, worker), (resumed, TrainingWorker(resumed))):
        fill(case, 2)
        while its_worker.work():
            pass
        found.append(rounds_of(case).state(0, "a"))
    (first, tokens), (second, resumed_tokens) = found
    assert tokens == resumed_tokens and first.keys() == second.keys()
    assert [name for name in first if first[name].numpy().tobytes() != second[name].numpy().tobytes()] == []


def test_a_damaged_document_costs_itself_and_nothing_else(settings: WorkerSettings) -> None:
    fill(settings)
    broken = sorted(documents_in(settings.directory).glob("*-t.document"))[0]
    broken.write_bytes(b"\0" * 100)
    worker = TrainingWorker(settings)
    for _ in range(3):
        assert worker.work()
    num_broken = rounds_of(settings).progress(settings.name).num_broken_files
    assert num_broken >= 1, "nobody would know"
    worker = TrainingWorker(settings)
    assert worker.work()
    assert rounds_of(settings).progress(settings.name).num_broken_files >= num_broken, "a restart must not hide it"


def test_process_that_a_run_waits_for_starts_like_everybody_else(settings: WorkerSettings) -> None:
    """With a busy neighbor on every core, one of the lowest priority took minutes to start, and the run waited."""
    process = TrainerProcess(settings.model_copy(update={"awaited": True}))
    handle, seen = psutil.Process(process.pid), []
    try:
        while handle.status() != psutil.STATUS_STOPPED:
            seen.append(handle.nice())
            time.sleep(0.01)
        assert process.wait_ready()
        assert (seen[len(seen) // 2], handle.nice()) == (os.nice(0), 19)
        assert process.lease() == 0, "its start is no part of the run"
    finally:
        process.kill()


def test_process_shares_the_session_of_the_run(settings: WorkerSettings) -> None:
    """Linux shares cores out among sessions first: in one of its own, a trainer of the lowest priority got half of a
    core that the learner needed."""
    process = TrainerProcess(settings)
    try:
        assert os.getsid(process.pid) == os.getsid(0)
        assert os.getpgid(process.pid) == process.pid, "Ctrl-C would end it"
    finally:
        process.kill()


def test_process_that_replaces_another_does_nothing_before_its_first_lease(settings: WorkerSettings) -> None:
    """Its start takes seconds of a core, beside the learner: that step took twice as long."""
    fill(settings)
    process = TrainerProcess(settings)
    try:
        handle = psutil.Process(process.pid)
        _wait(lambda: handle.status() == psutil.STATUS_STOPPED)
        time.sleep(0.2)
        assert sum(handle.cpu_times()[:2]) < 0.1
        assert process.lease() < 0.1
        _wait(lambda: rounds_of(settings).progress("a").num_tokens > 0)  # it starts and trains without another word
    finally:
        process.kill()


def test_process_gives_way_at_once_goes_on_and_dies_in_mid_slice_without_harm(settings: WorkerSettings) -> None:
    """A stopped process that still used its core would slow the engine; a killed one must leave only whole files."""
    fill(settings)
    rounds = rounds_of(settings)
    process = TrainerProcess(settings.model_copy(update={"awaited": True}))
    try:
        assert process.wait_ready()
        handle = psutil.Process(process.pid)
        assert rounds.progress("a").num_tokens == 0, "it trained before it was given a place"
        unleased_cpu_s = 0.0
        for _ in range(5):
            seen = rounds.progress("a").num_tokens
            unleased_cpu_s += process.lease()
            _wait(lambda seen=seen: rounds.progress("a").num_tokens > seen)
            process.recall()
            _wait(lambda: handle.status() == psutil.STATUS_STOPPED)
            used_s = sum(handle.cpu_times()[:2])
            time.sleep(0.05)
            assert sum(handle.cpu_times()[:2]) == used_s, "it works on after it was recalled"
        assert unleased_cpu_s < 0.1
        process.lease()
        seen = rounds.progress("a").num_tokens
        _wait(lambda: rounds.progress("a").num_tokens > seen)
        os.kill(process.pid, signal.SIGKILL)
        _wait(lambda: process.ended() is not None)
    finally:
        process.kill()
    number = rounds.close_round()
    assert all(torch.isfinite(weight).all() for weight in rounds.base(number).values())
    survivor = TrainingWorker(settings)
    assert survivor.work() and rounds.verdict(number) is not None


def test_cpu_time_without_a_lease_is_reported(settings: WorkerSettings) -> None:
    """Planted: somebody else lets the process run. What a run says about the cost of lending would be wrong."""
    process = TrainerProcess(settings)
    try:
        handle = psutil.Process(process.pid)
        os.kill(process.pid, signal.SIGCONT)
        _wait(lambda: sum(handle.cpu_times()[:2]) > 0.3)
        assert process.lease() > 0.3
        process.recall()
        assert process.lease() < 0.1
    finally:
        process.kill()


def _wait(condition, deadline_s: float = 180.0) -> None:
    until_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < until_s, "nothing happened"
        time.sleep(0.005)
