"""A drafter that survives sleep and reloads: kept in host memory before, compared by fingerprints and put back after.

    sleep(level=2)                                 keep ──▶ vLLM gives the weights' memory back
    wake_up, with the weights                               vLLM takes memory again ──▶ restore
    reload_weights; start ... finish_weight_update keep ──▶ vLLM loads a policy     ──▶ restore

Level 2 drops the weights of the drafter with the policy's; hosts send the policy anew, and nobody the drafter
(vLLM issue 52479: outputs stay right, drafts are never accepted again). A drafter that changes between two of these
calls was changed on purpose: it is kept as it is then, and updates of the drafter are not undone. A push of ours to a
policy with MTP heads of its own brings these heads too, and is such an update. Cached prefixes hold the drafter's keys
beside the policy's, so an update of the drafter alone has them forgotten: prompts that meet the keys of another drafter
have hardly a draft accepted.

`engine_core.py` tells of every call, whatever the host's worker extension is. The functions that keep and restore go to
the workers by name, as vLLM's `collective_rpc` sends functions.

Relied upon: vllm/v1/worker/gpu_worker.py, Worker: reload_weights, start_weight_update, start_draft_weight_update,
finish_weight_update.

Goes when vLLM keeps drafters over level 2 by itself, as 0.32 does if asked (`sleep_preserve_parameter_names`), and its
reloads are known to leave them alone.
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
"""The executor's `collective_rpc`: one answer of each worker."""
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
    """What happened to the drafter of one engine; told of every call before and after it is made."""

    def __init__(self, forget_prefixes: Callable[[], None], *, comes_with_policy: bool = False) -> None:
        """`comes_with_policy` says of a drafter that the policy's pushes bring it along."""
        self._forget_prefixes, self._comes_with_policy = forget_prefixes, comes_with_policy
        self.num_restored = self.num_failures = 0
        self.version = 0
        """The version last pushed, or the number of updates where these have no versions; 0 is the checkpoint."""
        self.updated_s = time.monotonic()
        self._kept = self._asleep = self._session = False

    @property
    def asleep(self) -> bool:
        """Whether the weights' memory is given back; nobody may touch it then."""
        return self._asleep

    def before(self, meaning: Meaning | None, rpc: Rpc) -> None:
        match meaning:
            case "nap" | "deep sleep":
                if meaning == "deep sleep":
                    self._keep(rpc)
                self._asleep = True
            case "reload" | "begin" | "push" if not (meaning == "push" and self._comes_with_policy):
                self._keep(rpc)
            case "push drafter" if self._asleep:
                pass  # it will be refused
            case "begin drafter" | "push drafter":
                self._kept, self._session = False, meaning == "begin drafter"

    def after(self, meaning: Meaning | None, rpc: Rpc) -> None:
        if meaning == "wake":
            self._asleep = False
        if meaning in ("wake", "reload", "end", "push", "push drafter") and not self._asleep:
            session = self._session and meaning == "end"
            self._look(rpc, session=session)
            if session or meaning == "push drafter":
                self._forget()

    def _keep(self, rpc: Rpc) -> None:
        if self._asleep:  # there is no memory to read
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
            _tell_first("cached prefixes of the old drafter could not be forgotten")
            self.num_failures += 1

    def _ask(self, rpc: Rpc, function: Callable[..., Any], *args: Any) -> Sequence[Mapping[str, int]]:
        try:
            return rpc(function, args=args)
        except Exception:  # noqa: BLE001  whatever it is, the host's call goes on; counted as draft/restore_failures
            _tell_first("the workers did not look after the drafter")
            return [{"failures": 1}]

    def _count_failures(self, answers: Sequence[Mapping[str, int]]) -> int:
        failures = sum(answer.get("failures", 0) for answer in answers)
        self.num_failures += failures
        return failures


def meaning_of(method: object, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Meaning | None:
    """What a call to the workers means for the drafter; None for most."""
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
    """Copy the drafter's own weights to the host. Runs in the worker, and never raises."""

    def keep(kept: Any, weights: Mapping[str, Any]) -> dict[str, int]:
        kept.keep(weights)
        return {}

    return _guarded(worker, keep)


def restore_weights(worker: Any, put_back: bool) -> dict[str, int]:
    """Put back what was lost since `keep_weights`, if asked to, and tell the drafter's version. Runs in the worker, and
    never raises."""

    def restore(kept: Any, weights: Mapping[str, Any]) -> dict[str, int]:
        if lost := kept.restore(weights):
            logger.warning("the drafter had lost %d of %d tensors; they are back", len(lost), len(weights))
        return {"restored": int(bool(lost))}

    answer = _guarded(worker, restore) if put_back else {}
    version = pushed_version(getattr(worker, "worker", worker), "drafter")
    return answer if version is None else answer | {"version": version}


def _guarded(worker: Any, do: Callable[[Any, Mapping[str, Any]], dict[str, int]]) -> dict[str, int]:
    try:
        from paceline.weights.host_copy import HostCopy  # needs xxhash, which a host may lack

        worker = getattr(worker, "worker", worker)  # vLLM passes the wrapper that it keeps the worker in
        if not hasattr(worker, _KEPT):
            setattr(worker, _KEPT, HostCopy())
        return do(getattr(worker, _KEPT), own_weights(worker))
    except Exception:  # noqa: BLE001  counted as draft/restore_failures
        _tell_first("the drafter's weights could not be kept or put back; it may draft worse, and costs no token")
        return {"failures": 1}


@functools.cache
def _tell_first(what: str) -> None:
    """Log the first error of a kind, with its traceback: a reload may come every few seconds."""
    logger.exception(what)
