"""What vLLM's worker can do for us (`worker_extension_cls`): its methods are reached by `VllmEngine.rpc`.

vLLM imports this module in the worker process before it loads the model, and nothing else imports it. That makes it the earliest
place where an engine of ours can begin to watch its owner: vLLM's own processes do not notice that the process that started them
was killed, and an orphaned engine would hold its memory and its cores for ever.

    owner (VllmEngine) ── EngineCore ── worker        the worker may also live inside EngineCore (one GPU)
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import psutil

from paceline.rollout import backends, compat
from paceline.rollout.transfer import Push

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker

_WATCH_PERIOD_S = 1.0


class WorkerExtension:
    """Mixed into vLLM's worker class: no state of its own here, and no name that the worker already has."""

    def paceline_processes(self) -> tuple[int, int]:
        """Process ids of this worker and of the EngineCore that it serves; the owner reaps both."""
        return os.getpid(), _engine_core_pid()

    def sampler_is_sound(self) -> bool:
        """Asked here and not in the owner's process: this is the one that samples."""
        return compat.sampler_is_sound()

    def receive_push(self, push: Mapping[str, Any]) -> dict[str, Any]:
        """Check a `transfer.Push` and load it; answers with a `transfer.PushReport`, both as plain dicts."""
        return backends.receive_push(cast("Worker", self), Push.from_dict(push)).to_dict()

    def applied_fingerprints(self) -> dict[str, Any]:
        """The last applied `transfer.PushReport` of each target; raises when a failed push left the weights unknown."""
        return {target: report.to_dict() for target, report in backends.applied(cast("Worker", self)).items()}

    def held_fp8(self) -> dict[str, str]:
        """Fingerprints of the policy's quantised layers and KV scales, taken now from the memory that its kernels read."""
        return backends.held_fp8(cast("Worker", self))

    def plant_fault(self, kind: str) -> None:
        """Damage the policy on purpose (`backends.plant_fault`), to see whether it is found."""
        backends.plant_fault(cast("Worker", self), kind)

    def drafter_figures(self) -> dict[str, float]:
        """What the history drafter counts (`proposer.FIGURES`); nothing for other drafters."""
        worker = cast("Worker", self)
        if worker.speculative_config is None:
            return {}
        drafter: object = worker.model_runner.drafter
        from paceline.rollout.proposer import HistoryProposer  # compiles kernels; other engines do without

        return drafter.figures() if isinstance(drafter, HistoryProposer) else {}


def _engine_core_pid() -> int:
    inside = multiprocessing.current_process().name.startswith("EngineCore")
    return os.getpid() if inside else os.getppid()


def _die_with_owner() -> None:
    """Kill EngineCore and this worker as soon as EngineCore has another parent than it had: its owner is gone.

    Not PR_SET_PDEATHSIG: that fires when the *thread* that started the process ends, and owners start engines from threads.
    One gap is left: an owner killed in the seconds before this module is imported leaves an EngineCore that nobody watches.
    """
    core = psutil.Process(_engine_core_pid())
    owner = core.ppid()
    try:
        while core.ppid() == owner:
            time.sleep(_WATCH_PERIOD_S)
        core.kill()
    except psutil.NoSuchProcess:
        pass  # EngineCore died on its own; this worker has no reason to live either way
    os.kill(os.getpid(), signal.SIGKILL)


if multiprocessing.current_process().name.startswith(("EngineCore", "VllmWorker")):
    threading.Thread(target=_die_with_owner, name="paceline-owner-watch", daemon=True).start()
