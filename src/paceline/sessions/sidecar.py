"""`paceline sidecar`: train the drafter of a server from rollouts and checkpoints that its host writes to disk.

    host ── rollouts, JSON lines ──▶ RolloutFiles ──┐
    host ── checkpoints ──▶ PolicyStates: hidden states ──▶ DrafterUpdater ── better drafter ──▶ vLLM's server
                                                            └── accepted length ◀── counters ──────────┘

A round runs every `period_s`: load a newer policy, score new rollouts with it, train, publish a better drafter, and
record metrics. The sidecar waits for a server that does not answer, and pushes the published drafter again after a
server's restart.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from paceline.config import DrafterTrainingConfig, LearnerConfig
from paceline.context import CancelledError, Context
from paceline.devices import fast_precision
from paceline.drafters.checkpoint import policy_config, preflight
from paceline.drafters.export import drafter_kind
from paceline.drafters.provenance import Provenance
from paceline.integrations.drafter_updates import DrafterUpdater
from paceline.integrations.engine_wire import EngineWire, ServerGoneError, http_rpc
from paceline.integrations.policy_states import PolicyStates
from paceline.integrations.rollout_files import RolloutFiles, RolloutReader
from paceline.metrics import JsonlSink, Recorder
from paceline.rollout.calls import ServedDrafter
from paceline.sessions.train import load_tokenizer
from paceline.types import PacelineError

_PATIENCE_S = 600.0
"""Timeout of an unresponsive server, which may be loading a large policy."""
_LOOK_S = 1.0
"""Seconds between retries."""
_LOGGER = "paceline.integrations"

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarSettings:
    server: str
    rollouts: Path
    policies: tuple[Path, ...]
    """Directories of the policy's checkpoints; the newest is used."""
    training: DrafterTrainingConfig
    drafter: Path | None = None
    """Initial drafter; None is the server's."""
    out: Path | None = None
    """Directory for a copy of the last published drafter."""
    metrics: Path | None = None
    """File for one JSON line per round."""
    share: float = 0.5
    """Share of time spent on scoring and training."""
    period_s: float = 10.0
    rounds: int | None = None
    """Number of rounds; None runs until interrupted."""

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"--share: got {self.share}; must be above 0 and at most 1: a share of the time")
        if not self.period_s > 0:
            raise ValueError(f"--period: got {self.period_s}; must be above 0 seconds")
        if self.out is not None and self.out.exists():
            raise ValueError(
                f"--out: got {self.out}, which exists; must not exist because every published drafter replaces it"
            )
        host = urlsplit(self.server).hostname
        if not _is_this_machine(host):
            raise ValueError(
                f"--server: got {self.server!r}; must be http://127.0.0.1:PORT or another address of the loopback, "
                "because the drafter passes through shared memory: run the sidecar on the server's machine"
            )


def _is_this_machine(host: str | None) -> bool:
    try:
        address = ip_address(host or "")
    except ValueError:
        return host == "localhost"
    return address.is_loopback or address.is_unspecified  # 0.0.0.0, as servers print it, connects to this machine


def run_sidecar(settings: SidecarSettings, context: Context) -> None:
    """Run `settings.rounds` rounds, or until interrupted."""
    wire = EngineWire(http_rpc(settings.server))
    served = _answer(wire.drafter, ServerGoneError, context)
    if served.problem is not None:
        raise PacelineError(f"{settings.server}: its drafter cannot be trained: {served.problem}")
    drafter, loaded = _checkpoint(settings.drafter, served)
    context.report(f"{settings.server} drafts with {served.kind}, up to {served.draft_length} tokens: {drafter}")
    updater = DrafterUpdater(wire, drafter, settings.training, draft_length=served.draft_length, loaded=loaded)
    sidecar = _Sidecar(settings, wire, updater, drafter, context)
    try:
        with _logged(context):
            sidecar.run()
    finally:
        sidecar.close()


def _checkpoint(given: Path | None, served: ServedDrafter) -> tuple[Path, bool]:
    """Return the initial drafter, and whether the server has loaded it."""
    named = Path(served.checkpoint)
    if given is None and not named.is_dir():
        raise ValueError(
            f"--drafter: got none, and the server's is {served.checkpoint!r}, which is not a directory here; must be "
            f"the directory of its checkpoint (`hf download {served.checkpoint}` prints it for a drafter from the hub)"
        )
    path = given or named
    if (kind := drafter_kind(path, key="--drafter")) != served.kind:
        raise ValueError(f"--drafter: got {path} of kind {kind}; must be {served.kind} because the server's is")
    return path, path.resolve() == named.resolve()


def _answer(ask: Callable[[], Answer], retry_on: type[PacelineError], context: Context) -> Answer:
    """Retry while errors of type `retry_on` occur, up to the timeout."""
    deadline_s, told = time.monotonic() + _PATIENCE_S, False
    while True:
        try:
            return ask()
        except retry_on as error:
            if time.monotonic() > deadline_s:
                raise
            if not told:
                context.report(f"waiting: {error}")
                told = True
        _rest(_LOOK_S, context)


def _rest(seconds: float, context: Context) -> None:
    if context.cancelled.wait(seconds):
        raise CancelledError("cancelled")


class _Sidecar:
    """One server, its host's files, and the drafter between them."""

    def __init__(
        self, settings: SidecarSettings, wire: EngineWire, updater: DrafterUpdater, drafter: Path, context: Context
    ) -> None:
        self._settings, self._wire, self._updater, self._context = settings, wire, updater, context
        self._drafter = drafter
        learner = LearnerConfig(world_size=1, dtype=fast_precision(), microbatch_tokens=4096)
        self._policy = PolicyStates(settings.policies, drafter, learner)
        self._files = RolloutFiles(settings.rollouts)
        self._reader: RolloutReader | None = None
        self._recorder = None if settings.metrics is None else Recorder(JsonlSink(settings.metrics))
        self._began_s = time.monotonic()
        self._num_rounds = self._num_broken = self._saved_version = 0

    def run(self) -> None:
        while self._settings.rounds is None or self._num_rounds < self._settings.rounds:
            _answer(self._wire.counters, PacelineError, self._context)
            began_s = time.monotonic()
            self._num_rounds += 1
            self._round(began_s)
            if self._updater.given_up:
                raise PacelineError("drafter training has ended after repeated failures; the server keeps its drafter")
            spent_s = time.monotonic() - began_s
            _rest(max(self._settings.period_s, spent_s / self._settings.share) - spent_s, self._context)

    def close(self) -> None:
        self._updater.close()
        self._policy.close()
        if self._recorder is not None:
            self._recorder.close()

    def _round(self, began_s: float) -> None:
        settings, policy = self._settings, self._policy
        budget_s = settings.share * settings.period_s
        self._follow_policy()
        loaded_s = time.monotonic()  # loading a policy is outside the budget
        samples = [] if self._reader is None else self._files.take(self._reader)
        documents = policy.documents(
            samples, settings.training.buffer, seed=(0, self._num_rounds), until_s=loaded_s + budget_s / 2
        )
        self._updater.add(documents, policy.version)
        scored_s = time.monotonic() - loaded_s
        if policy.head_VD is not None:
            self._updater.update(policy.head_VD, max(0.0, budget_s - scored_s))
        metrics = self._updater.metrics() | {
            "rollout/num_tokens": float(sum(sample.num_response_tokens for sample in samples)),
            "draft/new_rollouts": float(len(samples)),
            "draft/scored_rollouts": float(len(documents)),
            "draft/policies_loaded": float(policy.version),
            "draft/policy_failures": float(policy.num_failures),
            "draft/broken_lines": float(self._files.num_broken),
            "draft/skipped_bytes": float(self._files.num_skipped_bytes),
            "time/logprob": scored_s,
            "time/step": time.monotonic() - began_s,
        }
        self._save(int(metrics["draft/published_round"]))
        self._record(metrics)

    def _follow_policy(self) -> None:
        policy = self._policy
        try:
            changed = policy.follow()
        except Exception as error:
            if not policy.version:
                raise
            self._context.report(f"the newest policy cannot be loaded; using the previous one: {error}")
            return
        if policy.path is None:
            if self._num_rounds == 1:
                looked = " and ".join(map(str, self._settings.policies))
                self._context.report(f"waiting for a checkpoint of the policy with safetensors in {looked}")
            return
        if changed:
            self._context.report(f"policy {policy.path}")
        if self._reader is None:
            path, config = policy.path, policy_config(policy.path)
            preflight(self._drafter, path, kind=drafter_kind(self._drafter, key="--drafter"), max_model_len=1)
            self._reader = RolloutReader(
                lambda: load_tokenizer(path), vocabulary=config["vocab_size"], longest=config["max_position_embeddings"]
            )

    def _save(self, version: int) -> None:
        if self._settings.out is None or version == self._saved_version:
            return
        provenance = Provenance(
            policy=str(self._policy.path),
            data=f"rollouts of {self._settings.rollouts}",
            start=str(self._drafter),
            num_tokens=self._updater.num_tokens,
            seed=0,
            rl_steps=self._policy.version - 1,
        )
        self._updater.save(self._settings.out, provenance)
        self._saved_version = version

    def _record(self, metrics: Mapping[str, float]) -> None:
        if self._recorder is not None:
            record = {"step": self._num_rounds, "time_s": time.monotonic() - self._began_s}
            self._recorder.write("step", {**record, "metrics": {**metrics, **self._recorder.counts}})
        if self._files.num_broken > self._num_broken:
            self._num_broken = self._files.num_broken
            self._context.report(f"{self._num_broken} invalid lines so far; {self._files.problem}")
        if metrics["draft/new_rollouts"] or "draft/training_s" in metrics:
            self._context.report(f"round {self._num_rounds}: {_summary(metrics)}")


_SHOWN = {
    "draft/new_rollouts": "{:.0f} new rollouts",
    "rollout/accepted_length": "accepted length {:.2f}",
    "draft/tokens_trained": "trained on {:,.0f} tokens",
    "draft/overlap": "overlap {:.3f}",
    "draft/published_round": "drafter {:.0f}",
}
"""Metrics in the progress line of a round."""


def _summary(metrics: Mapping[str, float]) -> str:
    shown = [form.format(metrics[key]) for key, form in _SHOWN.items() if key in metrics]
    if metrics["draft/failures"]:
        shown.append(f"{metrics['draft/failures']:.0f} failures")
    return ", ".join(shown)


class _LogHandler(logging.Handler):
    """Forward log records of drafter training to the context."""

    def __init__(self, context: Context) -> None:
        super().__init__(logging.INFO)
        self._context = context

    def emit(self, record: logging.LogRecord) -> None:
        why = f": {record.exc_info[1]}" if record.exc_info else ""
        self._context.report(f"{record.getMessage()}{why}")


@contextmanager
def _logged(context: Context) -> Iterator[None]:
    logger, handler = logging.getLogger(_LOGGER), _LogHandler(context)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
