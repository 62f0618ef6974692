"""Online drafter training inside another host's loop.

    add ── documents ──▶ Buffer (in shared memory) ── draw ──▶ DrafterTrainer ── candidate ──┐
                            └── held-out prompts ──▶ compare with the published weights ◀────┘
                                                          │ better
    engine ◀── EngineWire.push, fingerprints compared ◀───┘

Calls of `update` keep to their budget on average: an overrun shortens the next ones. The engine's acceptance decides
whether training pays (drift.py). Since the host grants the budget, a gain must exceed only the cost of publishing.

No exception reaches the host: failures are counted in `draft/failures`, logged once, and end training if repeated. The
engine's counters report the version of its drafter, so a restarted engine gets the published drafter again.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from paceline.config import DrafterTrainingConfig
from paceline.drafters.buffer import Buffer
from paceline.drafters.checkpoint import load, save, weights_of
from paceline.drafters.drift import DriftMonitor
from paceline.drafters.failures import MAX_FAILURES, Failures
from paceline.drafters.packing import Document
from paceline.drafters.provenance import Provenance, write_provenance
from paceline.drafters.trainer import WEIGHTS, DrafterTrainer, Schedule, State, compare, load_weights, trained
from paceline.files import OwnedDirectory, remove_directory
from paceline.integrations.engine_wire import EngineWire
from paceline.metrics import Metrics
from paceline.orchestrator.engine_counters import Differences, since

if TYPE_CHECKING:
    from paceline.drafters.checkpoint import Drafter

logger = logging.getLogger(__name__)

_MOST_OVERDRAWN_S = 60.0
"""Limit of the carried overrun. Without it, a process that was suspended for an hour would not train for as long."""


class DrafterUpdater:
    """Train and publish the drafter of one engine. No method raises."""

    def __init__(
        self,
        wire: EngineWire,
        checkpoint: Path,
        config: DrafterTrainingConfig,
        *,
        draft_length: int,
        loaded: bool = True,
        seed: int = 0,
    ) -> None:
        """`checkpoint` is the engine's drafter, or the first to push; `draft_length` is the maximum draft length."""
        self._wire, self._checkpoint, self._config = wire, checkpoint, config
        self._draft_length, self._seed = draft_length, seed
        self._directory: OwnedDirectory | None = None
        self._buffer: Buffer | None = None
        self._trainer: DrafterTrainer | None = None
        self._judged: Drafter | None = None
        """A second model for evaluation and publishing."""
        self._published: State = {}
        self._version = 0 if loaded else -1
        """The engine's version; 0 is the checkpoint, -1 an unloaded one."""
        self._num_rounds = self._fresh_tokens = 0
        self.num_tokens = 0
        """Training tokens."""
        self._overdrawn_s = 0.0
        """Time spent beyond the budget."""
        self._drift = DriftMonitor()
        self._observed = False
        self._totals: Mapping[str, float] = {}
        self._differences = Differences()
        self._failures = Failures(
            lambda what, error: logger.error(
                "drafter training failed (%s); the engine keeps its drafter", what, exc_info=error
            ),
            lambda what: logger.warning(
                "drafter training ended after %d consecutive failures (%s)", MAX_FAILURES, what
            ),
        )
        self._step: dict[str, float] = {}
        """Metrics since the last call of `metrics`."""

    def add(self, documents: Sequence[Document], version: int) -> None:
        """Add rollouts with hidden states of this policy version."""
        with self._failures.contained("add"):
            if self.given_up:
                return
            if self._buffer is None:
                self._directory = OwnedDirectory(self._config.buffer.directory / f"paceline-{os.getuid()}")
                self._buffer = Buffer(self._directory.path, self._config.buffer, writer="host")
            self._buffer.put(documents, version)

    def update(self, head_VD: torch.Tensor, budget_s: float) -> None:
        """Read the engine's counters, train for about `budget_s`, and publish a better drafter. `head_VD` is the
        current policy's output head."""
        with self._failures.contained("observe"):
            self._observe()
        if not self._wanted():
            return
        with self._failures.contained("start"):
            self._follow(head_VD)  # importing and loading takes seconds once, outside the budget
        if self._trainer is None:
            return
        began_s = time.monotonic()
        with self._failures.contained("train"), torch.enable_grad():
            self._train(self._trainer, began_s + budget_s - self._overdrawn_s)
        if self._fresh_tokens >= self._config.round_tokens:
            with self._failures.contained("publish"):
                self._judge(self._trainer, head_VD)
        spent_s = time.monotonic() - began_s
        self._overdrawn_s = min(max(0.0, self._overdrawn_s + spent_s - budget_s), _MOST_OVERDRAWN_S)
        self._count("draft/training_s", spent_s)

    def metrics(self) -> dict[str, float]:
        """Return metrics since the last call, with the names of metrics.jsonl."""
        step, self._step = self._step, {}
        failures, self._failures.num = self._failures.num, 0
        trainer, buffer = self._trainer, self._buffer
        return {
            "draft/failures": float(failures),
            **self._drift.decide().metrics(),
            **step,
            "draft/tokens_trained": float(self.num_tokens),
            "draft/round": float(self._num_rounds),
            "draft/published_round": float(max(0, self._version)),
            "draft/skipped_steps": float(0 if trainer is None else trainer.num_skipped),
            "draft/broken_buffer_files": float(0 if buffer is None else buffer.num_broken),
        }

    def save(self, directory: Path, provenance: Provenance) -> None:
        """Write the published drafter as a checkpoint, replacing an older one. Do nothing if none was published."""
        with self._failures.contained("save"):
            if self._judged is None or self._version <= 0:
                return
            load_weights(self._judged, self._published)
            if directory.exists():
                remove_directory(directory)
            tokenizer = self._checkpoint / "tokenizer.json"
            save(self._judged, directory, tokenizer=tokenizer, notes=lambda new: write_provenance(new, provenance))

    def close(self) -> None:
        with self._failures.contained("close"):
            self._wire.close()
            if self._directory is not None:
                self._directory.close()

    @property
    def given_up(self) -> bool:
        """Return whether failures have ended training."""
        return self._failures.given_up

    def _observe(self) -> None:
        """Read the engine's counters, and push the drafter again if the engine lost it."""
        totals = dict(self._wire.counters())
        version = int(totals.pop("draft/version"))
        new, self._totals = since(self._totals, totals), totals
        step = Metrics()
        self._differences.add({"engine": totals}, step)
        self._step |= step.reduce()
        if verified := new["selector/verifications"]:
            accepted_length = 1 + new["selector/accepted_tokens"] / verified
            self._step["rollout/accepted_length"] = accepted_length
            self._drift.observe(accepted_length, new["selector/step_s"])
            self._observed = True
        if version != self._version and not self.given_up:
            self._push(self._start(), self._published, after=max(version, self._version))

    def _wanted(self) -> bool:
        worth_it = self._config.when == "always" or not self._observed or self._drift.decide().train
        return worth_it and not self.given_up and self._buffer is not None

    def _start(self) -> Drafter:
        """Load the model for evaluation and publishing."""
        if self._judged is None:
            with torch.random.fork_rng(devices=[]):  # leave the host's random state unchanged
                self._judged = load(self._checkpoint)
            self._published = {f"{WEIGHTS}{name}": w.detach().clone() for name, w in trained(self._judged).items()}
        return self._judged

    def _follow(self, head_VD: torch.Tensor) -> None:
        """Continue with the current policy's output head."""
        judged = self._start()
        if self._trainer is None:
            with torch.random.fork_rng(devices=[]):
                drafter = load(self._checkpoint)
            for model in (drafter, judged):
                nn.Module.to(model, head_VD.device)  # transformers' own `to` is annotated wrongly
            self._trainer = DrafterTrainer(drafter, head_VD, Schedule.online(self._config, self._draft_length))
            self._trainer.load_state_dict(self._published)
        self._trainer.set_head(head_VD)

    def _train(self, trainer: DrafterTrainer, deadline_s: float) -> None:
        assert self._buffer is not None
        trainer.drop_queue()  # left by a failure
        while time.monotonic() < deadline_s:
            rng = np.random.default_rng([self._seed, self.num_tokens])
            documents = self._buffer.draw(self._config.tokens_per_step, rng)
            if not documents:
                break
            trainer.submit(documents)
            trainer.run(lambda: False)
            num_tokens = sum(len(document.token_ids) for document in documents)
            self.num_tokens += num_tokens
            self._fresh_tokens += num_tokens
        self._step |= trainer.take_metrics()

    def _judge(self, trainer: DrafterTrainer, head_VD: torch.Tensor) -> None:
        """Compare the trained drafter with the engine's; publish it if better, discard it if worse."""
        assert self._buffer is not None
        judged, candidate = self._start(), State()

        def states() -> Iterator[State]:
            yield self._published
            candidate.update(trainer.state_dict())
            yield candidate

        documents = self._buffer.heldout(self._config.heldout_tokens)
        verdict = compare(judged, states(), documents, head_VD, draft_length=self._draft_length, config=self._config)
        if verdict is None:
            return  # wait for more held-out rollouts
        self._step |= verdict.metrics()
        self._num_rounds, self._fresh_tokens = self._num_rounds + 1, 0
        change = f"accepted length {verdict.before:.2f} -> {verdict.after:.2f} on held-out rollouts"
        done = "published" if verdict.publish else "not published"
        logger.info("drafter round %d: %s, %s (%s)", self._num_rounds, change, done, verdict.why)
        publish_s = self._push(judged, candidate, after=self._version) if verdict.publish else 0.0
        if not verdict.after >= verdict.before:  # worse, or not a number
            trainer.load_state_dict(self._published)
        self._drift.note_update(verdict, publish_s)

    def _push(self, drafter: Drafter, state: State, *, after: int) -> float:
        """Push these weights as the next version; return the seconds it took."""
        began_s = time.monotonic()
        load_weights(drafter, state)
        self._wire.push(after + 1, weights_of(drafter).items(), "drafter")
        self._version, self._published = after + 1, state
        publish_s = time.monotonic() - began_s
        self._count("draft/publish_s", publish_s)
        return publish_s

    def _count(self, key: str, value: float) -> None:
        self._step[key] = self._step.get(key, 0.0) + value
