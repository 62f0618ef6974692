"""What vLLM's worker can do for us (`worker_extension_cls`): methods that `VllmEngine.rpc` calls.

vLLM imports this module in the worker process before it loads the model, and nothing else imports it. That makes it the
earliest place where an engine of ours can begin to monitor its owner: vLLM's own processes do not notice that the
process that started them was killed, and an orphaned engine would hold its memory and its cores for ever.

    owner (VllmEngine) ── EngineCore ── worker
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import psutil

from paceline.rollout import receiver
from paceline.rollout.internals import sampler_fix
from paceline.rollout.internals.model_runner import proposer, runner_version, sampler
from paceline.rollout.internals.processes import engine_core_pid, inside_vllm
from paceline.weights.message import Push

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker

_LOOK_PERIOD_S = 1.0


class WorkerExtension:
    """Mixed into vLLM's worker class: no state of its own here, and no name that the worker already has."""

    def paceline_processes(self) -> tuple[int, int]:
        """Process ids of this worker and of the EngineCore that it serves; the owner reaps both."""
        return os.getpid(), engine_core_pid()

    def paceline_sampler(self) -> dict[str, Any]:
        """Model runner, sampler and scheduling of this worker, and whether the sampler is sound as far as we know.

        Asked here and not in the owner's process: this is the one that samples. Only V1's sampler has a known fault;
        V2 has another sampler.
        """
        worker = cast("Worker", self)
        version, found = runner_version(worker), type(sampler(worker))
        return {
            "runner": version,
            "sampler": f"{found.__module__}.{found.__qualname__}",
            "scheduling": "asynchronous" if worker.scheduler_config.async_scheduling else "synchronous",
            "sound": version == "v2" or sampler_fix.sampler_is_sound(),
        }

    def receive_push(self, push: Mapping[str, Any]) -> dict[str, Any]:
        """Check a `Push` and load it; answers with a `PushReport`, both as plain dicts."""
        return receiver.receive_push(cast("Worker", self), Push.from_dict(push)).to_dict()

    def applied_fingerprints(self) -> dict[str, Any]:
        """The last applied `PushReport` of each target; raises when a failed push left the weights unknown."""
        return {target: report.to_dict() for target, report in receiver.applied(cast("Worker", self)).items()}

    def held_fp8(self) -> dict[str, str]:
        """Fingerprints of the policy's quantised layers and KV scales, taken now from the memory that its kernels
        read."""
        return receiver.held_fp8(cast("Worker", self))

    def drafter_counters(self) -> dict[str, float]:
        """What the history drafter counts (`proposer.COUNTERS`); nothing for other drafters."""
        drafter = proposer(cast("Worker", self))
        if drafter is None:
            return {}
        from paceline.rollout.proposer import HistoryProposer  # compiles kernels; other engines do without

        return drafter.counters() if isinstance(drafter, HistoryProposer) else {}


def _die_with_owner() -> None:
    """Kill EngineCore and this worker as soon as EngineCore has another parent than it had: its owner is gone.

    Not PR_SET_PDEATHSIG: that fires when the *thread* that started the process ends, and owners start engines from
    threads. One gap is left: an owner killed in the seconds before this module is imported leaves an EngineCore that
    nobody monitors.
    """
    core = psutil.Process(engine_core_pid())
    owner = core.ppid()
    try:
        while core.ppid() == owner:
            time.sleep(_LOOK_PERIOD_S)
        core.kill()
    except psutil.NoSuchProcess:
        pass  # EngineCore died on its own; this worker has no reason to live either way
    os.kill(os.getpid(), signal.SIGKILL)


if inside_vllm():
    threading.Thread(target=_die_with_owner, name="paceline-owner-monitor", daemon=True).start()
