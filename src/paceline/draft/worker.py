"""The process that trains the drafter in the place of an idle engine, from both sides.

    owner (beside the engine): TrainerProcess ──SIGCONT: lease, SIGSTOP: recall──▶ process: TrainingWorker ──▶ draft/exchange.py
                                                                                        ▲
                                                                         draft/buffer.py

A recall has to be felt at once, and a micro-batch takes as long as it takes; so the process is stopped by the system in the middle
of it and goes on there in its next lease. It holds no lock that others need and says all that it has to say through files that are
moved into place, so neither a stop nor a kill at any instruction harms anybody. It dies with its owner, stopped or not.

    python -m paceline.draft.worker SETTINGS        writes "ready" when it could train, and stops itself
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil

from paceline.config import DrafterTrainingConfig, Section

if TYPE_CHECKING:
    import torch

    from paceline.draft.trainer import DrafterTrainer

_PR_SET_PDEATHSIG = 1
_EMPTY_WAIT_S = 0.02
_END_DEADLINE_S = 5.0


class WorkerSettings(Section):
    """Everything that the process is told."""

    name: str
    drafter: Path
    """The checkpoint that the run began with."""
    directory: Path
    """Of the run, shared by all workers of the node: documents/ and rounds/ are in it."""
    max_draft_length: int
    training: DrafterTrainingConfig
    cpus: tuple[int, ...] | None
    """That it may use: those of its engine."""
    seed: int


def documents_in(directory: Path) -> Path:
    return directory / "documents"


def rounds_in(directory: Path) -> Path:
    return directory / "rounds"


class TrainerProcess:
    """The owner's end. Every method returns at once, except `wait_ready` and `kill`."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        command = [sys.executable, "-m", __name__, settings.model_dump_json()]
        # A session of its own: Ctrl-C in a terminal is not for it, its owner ends it.
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)  # noqa: S603
        self._handle = psutil.Process(self._process.pid)
        self.pid = self._process.pid
        self._ready = False
        self._asking = threading.Lock()

    def wait_ready(self) -> bool:
        """Wait until it could train; False if it ended before. Blocks, and may be asked by several threads."""
        assert self._process.stdout is not None
        with self._asking:
            self._ready = self._ready or (self._process.stdout.readline() == b"ready\n" and self._wait_stopped())
        return self._ready and self.ended() is None

    def lease(self) -> None:
        self._signal(signal.SIGCONT)

    def recall(self) -> None:
        """Returns when no thread of it runs any more."""
        self._signal(signal.SIGSTOP)
        self._wait_stopped()

    def ended(self) -> int | None:
        """Its exit code, None while it lives."""
        return self._process.poll()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(_END_DEADLINE_S)

    def _signal(self, number: signal.Signals) -> None:
        if self.ended() is None:
            self._process.send_signal(number)

    def _wait_stopped(self) -> bool:
        """The system stops a thread when it leaves what it does in the kernel, a fraction of a millisecond as a rule."""
        while self.ended() is None:
            try:
                if self._handle.status() == psutil.STATUS_STOPPED:
                    return True
            except psutil.NoSuchProcess:
                return False
            time.sleep(0.0005)
        return False


class TrainingWorker:
    """The process's own end: what it does with the time that it is given, in steps that a test can take one by one."""

    def __init__(self, settings: WorkerSettings) -> None:
        import torch
        from torch import nn

        from paceline.draft.buffer import Buffer
        from paceline.draft.checkpoint import load
        from paceline.draft.exchange import Exchange

        self._settings = settings
        self._training = settings.training
        self._buffer = Buffer(documents_in(settings.directory), self._training.buffer)
        self._exchange = Exchange(rounds_in(settings.directory), settings.drafter)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._drafter, self._judged = load(settings.drafter), load(settings.drafter)
        for model in (self._drafter, self._judged):
            nn.Module.to(model, device)  # transformers' own `to` is annotated wrongly
        self._trainer: DrafterTrainer | None = None
        self._head_version = -1
        self._head_VD: torch.Tensor | None = None
        self._round = 0
        self._progress = self._exchange.progress(settings.name)  # of its predecessor in this place
        self._rng = np.random.default_rng([settings.seed, *settings.name.encode()])

    def work(self) -> bool:
        """One slice of training, or one judgement; False if there is nothing to do yet."""
        if not self._follow_policy():
            return False
        self._follow_round()
        began_s = _running_s()
        worked = self._judge() or self._train()
        if worked:
            spent_s = _running_s() - began_s
            self._progress = replace(self._progress, training_s=self._progress.training_s + spent_s)
            self._exchange.put_progress(self._settings.name, self._progress)
        return worked

    def _follow_policy(self) -> bool:
        """Teach with the newest policy's output head; False before there is any."""
        import torch

        from paceline.draft.trainer import DrafterTrainer, Schedule

        found = self._buffer.head()
        if found is not None and found[0] != self._head_version:
            self._head_version, head_VD = found
            self._head_VD = torch.from_numpy(np.array(head_VD)).to(self._drafter.device)
            if self._trainer is None:
                schedule = Schedule(
                    num_steps=None,
                    draft_length=self._settings.max_draft_length,
                    matrix_lr=self._training.matrix_lr,
                    other_lr=self._training.other_lr,
                    tokens_per_step=self._training.tokens_per_step,
                    pass_tokens=2 * self._training.tokens_per_step,  # they rarely make up a step exactly: one pass even so
                )
                self._trainer = DrafterTrainer(self._drafter, self._head_VD, schedule)
            self._trainer.teach_with(self._head_VD)
        return self._trainer is not None

    def _follow_round(self) -> None:
        """Go on from the newest base. What was trained on an older one since its round was closed came too late."""
        assert self._trainer is not None
        while (newest := self._exchange.round()) != self._round:
            try:
                state = self._exchange.base(newest)
            except FileNotFoundError:  # it was stopped here, and meanwhile there is a newer one
                continue
            self._trainer.drop_queue()
            self._trainer.load_state_dict(state)
            self._round = newest

    def _judge(self) -> bool:
        """Compare a new base with the published one, if nobody has yet."""
        from paceline.draft.drift import judge
        from paceline.draft.trainer import evaluate, load_weights

        published, drift = self._exchange.published(), self._training.drift
        if self._round == published or self._exchange.verdict(self._round) is not None:
            return False
        documents = self._buffer.heldout(drift.heldout_tokens)
        if 4 * sum(document.num_anchors for document in documents) < drift.heldout_tokens:
            return False  # the next steps bring more
        assert self._head_VD is not None
        found = []
        for number in (published, self._round):
            try:
                load_weights(self._judged, self._exchange.base(number))
            except FileNotFoundError:  # as above
                return False
            found.append(evaluate(self._judged, documents, self._head_VD, draft_length=self._settings.max_draft_length))
        before, after = found
        verdict = judge(
            before=before.accepted_length[-1], after=after.accepted_length[-1], num_tokens=after.num_tokens, config=drift
        )
        self._exchange.put_verdict(self._round, verdict)
        return True

    def _train(self) -> bool:
        from paceline.draft.exchange import Progress

        assert self._trainer is not None
        documents = self._buffer.draw(self._training.tokens_per_step, self._rng)
        if not documents:
            return False
        self._trainer.submit(documents)
        self._trainer.run(lambda: False)
        self._exchange.put_state(self._round, self._settings.name, self._trainer.state_dict(), self._trainer.fresh_tokens)
        self._progress = Progress(
            training_s=self._progress.training_s,
            num_tokens=self._progress.num_tokens + sum(len(document.token_ids) for document in documents),
            num_skipped=self._trainer.num_skipped,
            overlap=self._trainer.take_metrics()["draft/overlap"],
        )
        return True


def _running_s() -> float:
    """Time in which this thread was on a core or waited for one; not that in which it was stopped, which no other clock leaves
    out."""
    on_core_ns, waiting_ns, _ = Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()
    return (int(on_core_ns) + int(waiting_ns)) / 1e9


def main(settings: WorkerSettings) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.dup(1)
    os.dup2(2, 1)  # nobody reads what libraries print
    os.setpriority(os.PRIO_PROCESS, 0, 19)  # while it starts, nobody has lent it anything
    if settings.cpus is not None:
        os.sched_setaffinity(0, settings.cpus)
    import torch

    torch.set_num_threads(len(settings.cpus) if settings.cpus else 1)
    worker = TrainingWorker(settings)
    os.write(answers, b"ready\n")
    os.kill(os.getpid(), signal.SIGSTOP)
    while True:
        if not worker.work():
            time.sleep(_EMPTY_WAIT_S)


if __name__ == "__main__":
    main(WorkerSettings.model_validate_json(sys.argv[1]))
