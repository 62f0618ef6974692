"""Process that trains the drafter on an idle engine's device, and its owner's handle.

    owner (beside the engine): TrainerProcess ──SIGCONT: lease, SIGSTOP: recall──▶ process: TrainingWorker ──▶ rounds.py
                                                                                        ▲
                                                                                    buffer.py

A recall must take effect before a micro-batch ends, so SIGSTOP stops the process anywhere and its next lease continues
there. The process holds no shared locks and reports only through files that are moved into place, so a stop or kill at
any instruction is safe. It dies with its owner.

A process started with the run writes "ready" after initialization and stops itself. A replacement is stopped by its
owner immediately and initializes in its leases.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
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
    """Settings of the process."""

    name: str
    drafter: Path
    """The run's initial drafter."""
    directory: Path
    """Directory with documents/ and rounds/, shared by all workers of the node."""
    max_draft_length: int
    training: DrafterTrainingConfig
    cpus: tuple[int, ...] | None
    """The engine's cores, which the process may use."""
    device: DeviceKind | None = None
    """Device; None selects it automatically."""
    seed: int
    awaited: bool = False
    """The run waits for this process, so it initializes immediately and at normal priority."""


def documents_in(directory: Path) -> Path:
    return directory / "documents"


def rounds_in(directory: Path) -> Path:
    return directory / "rounds"


class TrainerProcess:
    """The owner's handle of the process. Only `wait_ready` and `kill` block; they may run in other threads."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        command = [sys.executable, "-m", __name__, settings.model_dump_json()]
        # A separate process group, because Ctrl-C is for the owner only. Not a session: the scheduler divides cores
        # among sessions, which would cancel the low priority.
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, process_group=0)  # noqa: S603
        self._handle = psutil.Process(self._process.pid)
        self.pid = self._process.pid
        self._recalled_cpu_s = 0.0
        """CPU time used when it was last stopped."""
        if not settings.awaited:
            self._signal(signal.SIGSTOP)

    def wait_ready(self) -> bool:
        """Wait for initialization; return False if the process ended before."""
        assert self._process.stdout is not None and self.settings.awaited
        ready = self._process.stdout.readline() == b"ready\n" and self._wait_stopped()
        self._recalled_cpu_s = self._cpu_s()
        return ready

    def lease(self) -> float:
        """Resume the process; return the CPU seconds used since it was stopped, which should be zero."""
        unleased_cpu_s = max(0.0, self._cpu_s() - self._recalled_cpu_s)
        self._signal(signal.SIGCONT)
        return unleased_cpu_s

    def recall(self) -> None:
        """Stop the process. On a busy machine it may show as running for a while, but executes nothing more."""
        self._signal(signal.SIGSTOP)
        self._recalled_cpu_s = self._cpu_s()

    def ended(self) -> int | None:
        """Return the exit code, or None while the process runs."""
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
        """Wait until the process has stopped itself; return False if it ended before."""
        with suppress(psutil.NoSuchProcess):
            while self.ended() is None:
                if self._handle.status() == psutil.STATUS_STOPPED:
                    return True
                time.sleep(0.0005)
        return False


class TrainingWorker:
    """The work of the process, in steps that tests can run one by one."""

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
        self._progress = self._before = self._rounds.progress(settings.name)  # of its predecessor, if any

    def work(self) -> bool:
        """Train one slice or evaluate one base; return False if there is nothing to do."""
        began_s = _running_s()
        worked = finished = False
        # The policy may have changed while the process was stopped.
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
        """Load the newest policy's output head; return False before the first."""
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
        """Continue from the newest base, or from a predecessor's state of it. Drop training on older bases."""
        assert self._trainer is not None
        while (newest := self._rounds.round()) != self._round:
            try:
                state, fresh_tokens = self._rounds.state(newest, self._settings.name)
            except FileNotFoundError:  # replaced by a newer base while stopped here
                continue
            self._trainer.drop_queue()
            self._trainer.load_state_dict(state)
            self._trainer.fresh_tokens = fresh_tokens
            self._round = newest

    def _judge(self) -> bool:
        """Compare a new base with the published one, unless another worker has."""
        from paceline.drafters.trainer import compare

        published = self._rounds.published()
        if self._round == published or self._rounds.verdict(self._round) is not None:
            return False
        assert self._head_VD is not None
        try:
            verdict = compare(
                self._judged,
                map(self._rounds.base, (published, self._round)),
                self._buffer.heldout(self._training.heldout_tokens),
                self._head_VD,
                draft_length=self._settings.max_draft_length,
                config=self._training,
            )
        except FileNotFoundError:  # as above
            return False
        if verdict is None:
            return False  # wait for more held-out rollouts
        self._rounds.put_verdict(self._round, verdict)
        return True

    def _train(self) -> bool:
        assert self._trainer is not None
        # From counters that a checkpoint holds, so that a resumed run draws the same documents.
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
    """Return the time in which this thread ran or waited for a core. Other clocks include stopped time."""
    on_core_ns, waiting_ns, _ = Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()
    return (int(on_core_ns) + int(waiting_ns)) / 1e9


def main(settings: WorkerSettings) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.dup(1)
    os.dup2(2, 1)  # redirect the output of libraries to stderr
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
