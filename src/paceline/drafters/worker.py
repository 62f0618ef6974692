"""The process that trains the drafter on an idle engine's device, and the owner's handle of it.

    owner (beside the engine): TrainerProcess ──SIGCONT: lease, SIGSTOP: recall──▶ process: TrainingWorker ──▶ rounds.py
                                                                                        ▲
                                                                                    buffer.py

A recall must take effect at once, and a micro-batch takes as long as it takes; so the system stops the process in the
middle of it, and the process continues there in its next lease: nothing that it has done is lost. No thread of it runs
another instruction once the signal is sent, so nobody waits for its answer, and outside its leases it takes no time of
any core. It holds no lock that others need and reports only through files that are moved into place, so neither a stop
nor a kill at any instruction harms anybody. It dies with its owner, stopped or not; with the run, if it never had a
lease.

    python -m paceline.drafters.worker SETTINGS

The process that a run waits for at its start writes "ready" when it could train, and stops itself. One that takes the
place of another is stopped by its owner before it has done anything, and starts in its leases.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil

from paceline.config import DrafterTrainingConfig, Section
from paceline.types import DeviceKind

if TYPE_CHECKING:
    import torch

    from paceline.drafters.trainer import DrafterTrainer

_PR_SET_PDEATHSIG = 1
_EMPTY_WAIT_S = 0.02
_END_DEADLINE_S = 5.0


class WorkerSettings(Section):
    """All settings of the process."""

    name: str
    drafter: Path
    """The checkpoint that the run began with."""
    directory: Path
    """The run's directory, shared by all workers of the node: it holds documents/ and rounds/."""
    max_draft_length: int
    training: DrafterTrainingConfig
    cpus: tuple[int, ...] | None
    """Cores that the process may use: those of its engine."""
    device: DeviceKind | None = None
    """What it computes on; None is what it finds."""
    seed: int
    awaited: bool = False
    """The run waits until it is ready, so it starts at once and with the priority of everybody else."""


def documents_in(directory: Path) -> Path:
    return directory / "documents"


def rounds_in(directory: Path) -> Path:
    return directory / "rounds"


class TrainerProcess:
    """The owner's handle of the process, in one thread. Every method returns at once, except `wait_ready` and `kill`,
    which block and may be called in others."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        command = [sys.executable, "-m", __name__, settings.model_dump_json()]
        # A group of its own: Ctrl-C in a terminal is not for it, its owner ends it. Not a session: the system would
        # share the cores out among sessions, and its low priority would count for nothing beside the run's.
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, process_group=0)  # noqa: S603
        self._handle = psutil.Process(self._process.pid)
        self.pid = self._process.pid
        self._recalled_cpu_s = 0.0
        """What it had used when it was stopped last."""
        if not settings.awaited:
            self._signal(signal.SIGSTOP)

    def wait_ready(self) -> bool:
        """Wait until a process that is awaited could train; False if it ended before."""
        assert self._process.stdout is not None and self.settings.awaited
        ready = self._process.stdout.readline() == b"ready\n" and self._wait_stopped()
        self._recalled_cpu_s = self._cpu_s()
        return ready

    def lease(self) -> float:
        """Let the process run; returns the CPU seconds that it has used since it was stopped, which should be none."""
        unleased_cpu_s = max(0.0, self._cpu_s() - self._recalled_cpu_s)
        self._signal(signal.SIGCONT)
        return unleased_cpu_s

    def recall(self) -> None:
        """Stop the process. Where its threads wait for a core it may take long until the system calls it stopped, but
        they do nothing more."""
        self._signal(signal.SIGSTOP)
        self._recalled_cpu_s = self._cpu_s()

    def ended(self) -> int | None:
        """Exit code of the process; None while it lives."""
        return self._process.poll()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(_END_DEADLINE_S)

    def _signal(self, number: signal.Signals) -> None:
        if self.ended() is None:
            self._process.send_signal(number)

    def _cpu_s(self) -> float:
        try:
            times = self._handle.cpu_times()
        except psutil.NoSuchProcess:
            return 0.0
        return times.user + times.system

    def _wait_stopped(self) -> bool:
        """Wait until the process has stopped itself; False if it ended before."""
        while self.ended() is None:
            try:
                if self._handle.status() == psutil.STATUS_STOPPED:
                    return True
            except psutil.NoSuchProcess:
                return False
            time.sleep(0.0005)
        return False


class TrainingWorker:
    """The work of the process while it is leased, in steps that a test can take one by one."""

    def __init__(self, settings: WorkerSettings) -> None:
        from torch import nn

        from paceline.devices import use_device
        from paceline.drafters.buffer import Buffer
        from paceline.drafters.checkpoint import load
        from paceline.drafters.rounds import Rounds

        self._settings = settings
        self._training = settings.training
        self._buffer = Buffer(documents_in(settings.directory), self._training.buffer)
        self._rounds = Rounds(rounds_in(settings.directory), settings.drafter)
        device = use_device(kind=settings.device)
        self._drafter, self._judged = load(settings.drafter), load(settings.drafter)
        for model in (self._drafter, self._judged):
            nn.Module.to(model, device)  # transformers' own `to` is annotated wrongly
        self._trainer: DrafterTrainer | None = None
        self._head_version = -1
        self._head_VD: torch.Tensor | None = None
        self._round = -1
        self._counted = self._training.inline_slices if self._training.mode == "inline" else None
        self._num_slices = 0
        """Slices made with the present head."""
        self._progress = self._before = self._rounds.progress(settings.name)  # its predecessor's, if there was one

    def work(self) -> bool:
        """Train one slice or evaluate one base; False if there is nothing to do yet."""
        began_s = _running_s()
        worked = finished = False
        # One that was stopped after its last slice goes on with the head that it knew: it must look for the newest.
        if self._follow_policy() and self._progress.finished_version != self._head_version:
            self._follow_round()
            began_s = _running_s()
            worked = self._judge() or (self._num_slices != self._counted and self._train())
            finished = self._counted is not None and not worked
            if finished:
                self._progress = replace(self._progress, finished_version=self._head_version)
        num_broken_files = self._before.num_broken_files + self._buffer.num_broken + self._rounds.num_broken
        if worked or finished or num_broken_files > self._progress.num_broken_files:
            spent_s = _running_s() - began_s
            self._progress = replace(
                self._progress, training_s=self._progress.training_s + spent_s, num_broken_files=num_broken_files
            )
            self._rounds.put_progress(self._settings.name, self._progress)
        return worked

    def _follow_policy(self) -> bool:
        """Take over the newest policy's output head; False before there is any."""
        import torch

        from paceline.drafters.trainer import DrafterTrainer, Schedule

        found = self._buffer.head()
        if found is not None and found[0] != self._head_version:
            self._head_version, head_VD = found
            self._head_VD = torch.from_numpy(np.array(head_VD)).to(self._drafter.device)
            if self._trainer is None:
                schedule = Schedule.online(self._training, self._settings.max_draft_length)
                self._trainer = DrafterTrainer(self._drafter, self._head_VD, schedule)
            self._trainer.set_head(self._head_VD)
            self._num_slices = 0
        return self._trainer is not None

    def _follow_round(self) -> None:
        """Continue from the newest base, or from what a predecessor of the same name has made of it; what was trained
        on an older one since its round was closed is dropped."""
        assert self._trainer is not None
        while (newest := self._rounds.round()) != self._round:
            try:
                state, fresh_tokens = self._rounds.state(newest, self._settings.name)
            except FileNotFoundError:  # it was stopped here, and meanwhile there is a newer one
                continue
            self._trainer.drop_queue()
            self._trainer.load_state_dict(state)
            self._trainer.fresh_tokens = fresh_tokens
            self._round = newest

    def _judge(self) -> bool:
        """Compare a new base with the published one, if no worker has yet."""
        from paceline.drafters.comparison import compare

        published, drift = self._rounds.published(), self._training.drift
        if self._round == published or self._rounds.verdict(self._round) is not None:
            return False
        assert self._head_VD is not None
        try:
            verdict = compare(
                self._judged,
                map(self._rounds.base, (published, self._round)),
                self._buffer.heldout(drift.heldout_tokens),
                self._head_VD,
                draft_length=self._settings.max_draft_length,
                config=drift,
            )
        except FileNotFoundError:  # as above
            return False
        if verdict is None:
            return False  # the next steps bring more
        self._rounds.put_verdict(self._round, verdict)
        return True

    def _train(self) -> bool:
        assert self._trainer is not None
        # By counters that a checkpoint of the run holds, so that a run that goes on draws alike.
        seed = [self._settings.seed, *self._settings.name.encode(), self._round, self._trainer.num_steps]
        documents = self._buffer.draw(self._training.tokens_per_step, np.random.default_rng(seed))
        if not documents:
            return False
        self._trainer.submit(documents)
        self._trainer.run(lambda: False)
        self._num_slices += 1
        self._rounds.put_state(self._round, self._settings.name, self._trainer.state_dict(), self._trainer.fresh_tokens)
        self._progress = replace(
            self._progress,
            num_tokens=self._progress.num_tokens + sum(len(document.token_ids) for document in documents),
            num_skipped=self._before.num_skipped + self._trainer.num_skipped,
            overlap=self._trainer.take_metrics()["draft/overlap"],
        )
        return True


def _running_s() -> float:
    """Time in which this thread was on a core or waited for one. No other clock leaves out the time in which it was
    stopped."""
    on_core_ns, waiting_ns, _ = Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()
    return (int(on_core_ns) + int(waiting_ns)) / 1e9


def main(settings: WorkerSettings) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.dup(1)
    os.dup2(2, 1)  # nobody reads what libraries print
    if not settings.awaited:
        os.setpriority(os.PRIO_PROCESS, 0, 19)
    if settings.cpus is not None:
        os.sched_setaffinity(0, settings.cpus)
    import torch

    torch.set_num_threads(len(settings.cpus) if settings.cpus else 1)
    worker = TrainingWorker(settings)
    if settings.awaited:
        os.setpriority(os.PRIO_PROCESS, 0, 19)
        os.write(answers, b"ready\n")
        os.kill(os.getpid(), signal.SIGSTOP)
    while True:
        if not worker.work():
            time.sleep(_EMPTY_WAIT_S)


if __name__ == "__main__":
    main(WorkerSettings.model_validate_json(sys.argv[1]))
