"""Methods of vLLM's worker that `VllmEngine.rpc` calls (`worker_extension_cls`).

vLLM imports this module in the worker process before it loads the model, and nothing else imports it. So it is the
earliest place to set how the worker samples, and to monitor the engine's owner: vLLM's processes do not notice that
their parent was killed.
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
from paceline.rollout.internals import coupling, sampler_fix, verification_monitor
from paceline.rollout.internals.model_runner import proposer, runner_version, sampler
from paceline.rollout.internals.processes import engine_core_pid, inside_vllm
from paceline.weights.message import Push

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker

_LOOK_PERIOD_S = 1.0


class WorkerExtension:
    """Mixed into vLLM's worker class. Must have no state and no name that the worker has."""

    def paceline_processes(self) -> tuple[int, int]:
        """Return the process ids of this worker and its EngineCore; the owner reaps both."""
        return os.getpid(), engine_core_pid()

    def paceline_sampler(self) -> dict[str, Any]:
        """Return model runner, sampler, verification and scheduling of this worker, whether the sampler has the known
        fault, and whether a seeded request's tokens depend on seed and position only.

        Asked in the worker because it samples, not the owner. Only V1's sampler has a known fault.
        """
        worker = cast("Worker", self)
        version, found = runner_version(worker), type(sampler(worker))
        return {
            "runner": version,
            "sampler": f"{found.__module__}.{found.__qualname__}",
            "scheduling": "asynchronous" if worker.scheduler_config.async_scheduling else "synchronous",
            "sound": version == "v2" or sampler_fix.sampler_is_sound(),
            "verification": coupling.verification(),
            "keyed": coupling.has_keyed_noise(),
        }

    def receive_push(self, push: Mapping[str, Any]) -> dict[str, Any]:
        """Check a `Push` and load it; return a `PushReport`. Both are plain dicts."""
        return receiver.receive_push(cast("Worker", self), Push.from_dict(push)).to_dict()

    def applied_fingerprints(self) -> dict[str, Any]:
        """Return the last `PushReport` of each target; raise if a failed push left the weights unknown."""
        return {target: report.to_dict() for target, report in receiver.applied(cast("Worker", self)).items()}

    def held_fp8(self) -> dict[str, str]:
        """Return current fingerprints of the policy's quantized layers and KV scales."""
        return receiver.held_fp8(cast("Worker", self).get_model())

    def drafter_counters(self) -> dict[str, float]:
        """Return the history drafter's counters (`proposer.COUNTERS`); empty for other drafters."""
        drafter = proposer(cast("Worker", self))
        if drafter is None:
            return {}
        from paceline.rollout.proposer import HistoryProposer  # compiles kernels; other engines do without

        return drafter.counters() if isinstance(drafter, HistoryProposer) else {}

    def monitor_figures(self) -> dict[str, float]:
        """Return evidence and counts of the losslessness monitor, by metric key."""
        return verification_monitor.figures()


def _die_with_owner() -> None:
    """Kill EngineCore and this worker when EngineCore's parent changes: its owner is gone.

    PR_SET_PDEATHSIG fires when the starting *thread* ends, and owners start engines from threads. One gap remains: an
    owner killed in the seconds before this import leaves an unmonitored EngineCore.
    """
    core = psutil.Process(engine_core_pid())
    owner = core.ppid()
    try:
        while core.ppid() == owner:
            time.sleep(_LOOK_PERIOD_S)
        core.kill()
    except psutil.NoSuchProcess:
        pass  # EngineCore has died; this worker must too
    os.kill(os.getpid(), signal.SIGKILL)


coupling.install()
if inside_vllm():
    threading.Thread(target=_die_with_owner, name="paceline-owner-monitor", daemon=True).start()
