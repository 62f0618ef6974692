"""Keep the drafter across sleep and reloads: copy it to host memory before, compare and restore it after.

    sleep(level=2)                                 keep ──▶ vLLM frees the weights' memory
    wake_up, with the weights                               vLLM allocates memory   ──▶ restore
    reload_weights; start ... finish_weight_update keep ──▶ vLLM loads a policy     ──▶ restore

Level 2 drops the drafter with the policy; hosts send only the policy again (vLLM issue 52479: outputs stay right, but
no draft is accepted any more). A drafter that changes between two of these calls was updated on purpose and is kept as
it is. Cached prefixes hold the drafter's keys beside the policy's, so they are evicted after an update of the drafter
alone: with keys of another drafter, hardly any draft is accepted.

`engine_core.py` reports every call, with any worker extension. The functions that keep and restore are sent to the
workers by vLLM's `collective_rpc`.

Relied upon: vllm/v1/worker/gpu_worker.py, Worker: reload_weights, start_weight_update, start_draft_weight_update,
finish_weight_update.

Goes when vLLM keeps drafters over level 2 by default (0.32 has the option `sleep_preserve_parameter_names`), and its
reloads do not change them.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from paceline.rollout.internals.drafter_model import own_weights
from paceline.rollout.internals.transfer_engine import pushed_version

logger = logging.getLogger(__name__)

Rpc = Callable[..., Sequence[Any]]
"""The executor's `collective_rpc`: one answer per worker."""
Meaning = Literal["nap", "deep sleep", "wake", "reload", "begin", "begin drafter", "end", "push", "push drafter"]

_KEPT = "_paceline_kept"
_PUSHES = ("receive_push", "paceline_push")
_MEANINGS: dict[str, Meaning] = {
    "reload_weights": "reload",
    "start_weight_update": "begin",
    "start_draft_weight_update": "begin drafter",
    "finish_weight_update": "end",
}


class DrafterSurvival:
    """State of one engine's drafter, updated before and after every call."""

    def __init__(self, forget_prefixes: Callable[[], None], *, comes_with_policy: bool = False) -> None:
        """`comes_with_policy` marks a drafter that is updated by pushes of the policy."""
        self._forget_prefixes, self._comes_with_policy = forget_prefixes, comes_with_policy
        self.num_restored = self.num_failures = 0
        self.version = 0
        """Last pushed version, or number of updates without versions; 0 is the checkpoint."""
        self.updated_s = time.monotonic()
        self.asleep = False
        """The weights' memory is freed and must not be accessed."""
        self._kept = self._session = False

    def before(self, meaning: Meaning | None, rpc: Rpc) -> None:
        match meaning:
            case "nap" | "deep sleep":
                if meaning == "deep sleep":
                    self._keep(rpc)
                self.asleep = True
            case "reload" | "begin" | "push" if not (meaning == "push" and self._comes_with_policy):
                self._keep(rpc)
            case "push drafter" if self.asleep:
                pass  # will be refused
            case "begin drafter" | "push drafter":
                self._kept, self._session = False, meaning == "begin drafter"

    def after(self, meaning: Meaning | None, rpc: Rpc) -> None:
        if meaning == "wake":
            self.asleep = False
        if meaning in ("wake", "reload", "end", "push", "push drafter") and not self.asleep:
            session = self._session and meaning == "end"
            self._look(rpc, session=session)
            if session or meaning == "push drafter":
                self._forget()

    def _keep(self, rpc: Rpc) -> None:
        if self.asleep:  # no memory to read
            return
        self._kept = not self._count_failures(self._ask(rpc, keep_weights))

    def _look(self, rpc: Rpc, *, session: bool) -> None:
        answers = self._ask(rpc, restore_weights, self._kept)
        self._kept = self._session = False
        self._count_failures(answers)
        self.num_restored += sum(answer.get("restored", 0) for answer in answers)
        pushed = min((answer["version"] for answer in answers if "version" in answer), default=None)
        version = self.version + session if pushed is None else pushed
        if version != self.version:
            self.version, self.updated_s = version, time.monotonic()

    def _forget(self) -> None:
        try:
            self._forget_prefixes()
        except Exception:  # noqa: BLE001  counted as draft/restore_failures
            _log_first("cannot evict cached prefixes of the old drafter")
            self.num_failures += 1

    def _ask(self, rpc: Rpc, function: Callable[..., Any], *args: Any) -> Sequence[Mapping[str, int]]:
        try:
            return rpc(function, args=args)
        except Exception:  # noqa: BLE001  the host's call must continue; counted as draft/restore_failures
            _log_first("the workers failed to keep or restore the drafter")
            return [{"failures": 1}]

    def _count_failures(self, answers: Sequence[Mapping[str, int]]) -> int:
        failures = sum(answer.get("failures", 0) for answer in answers)
        self.num_failures += failures
        return failures


def meaning_of(method: object, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Meaning | None:
    """Classify a call to the workers by its effect on the drafter; None for most."""
    first = args[0] if args else next(iter((kwargs or {}).values()), None)
    match method:
        case "sleep":
            level = 1 if first is None else first
            return "deep sleep" if level >= 2 else "nap" if level == 1 else None
        case "wake_up":
            return "wake" if first is None or "weights" in first else None
        case str() if method in _PUSHES and isinstance(first, Mapping):
            return "push drafter" if first.get("target") == "drafter" else "push"
        case str():
            return _MEANINGS.get(method)
    return None


def keep_weights(worker: Any) -> dict[str, int]:
    """Copy the drafter's own weights to the host. Runs in the worker and never raises."""

    def keep(kept: Any, weights: Mapping[str, Any]) -> dict[str, int]:
        kept.keep(weights)
        return {}

    return _guarded(worker, keep)


def restore_weights(worker: Any, put_back: bool) -> dict[str, int]:
    """Restore weights lost since `keep_weights` if `put_back`, and return the drafter's version. Runs in the worker and
    never raises."""

    def restore(kept: Any, weights: Mapping[str, Any]) -> dict[str, int]:
        if lost := kept.restore(weights):
            logger.warning("restored %d of %d tensors of the drafter", len(lost), len(weights))
        return {"restored": int(bool(lost))}

    answer = _guarded(worker, restore) if put_back else {}
    version = pushed_version(getattr(worker, "worker", worker), "drafter")
    return answer if version is None else answer | {"version": version}


def _guarded(worker: Any, do: Callable[[Any, Mapping[str, Any]], dict[str, int]]) -> dict[str, int]:
    try:
        from paceline.weights.fingerprint import HostCopy  # needs xxhash, which a host may lack

        worker = getattr(worker, "worker", worker)  # vLLM passes the worker's wrapper
        if not hasattr(worker, _KEPT):
            setattr(worker, _KEPT, HostCopy())
        return do(getattr(worker, _KEPT), own_weights(worker))
    except Exception:  # noqa: BLE001  counted as draft/restore_failures
        _log_first("cannot keep or restore the drafter's weights; acceptance may drop, outputs stay correct")
        return {"failures": 1}


@functools.cache
def _log_first(what: str) -> None:
    """Log the first error of a kind with its traceback; reloads may come every few seconds."""
    logger.exception(what)
