"""Online drafter training inside another host's loop: keep rollouts, train for a while, publish what is better.

    add ── documents ──▶ Buffer (in shared memory) ── draw ──▶ DrafterTrainer ── candidate ──┐
                            └── held-out prompts ──▶ compare with the published weights ◀────┘
                                                          │ better
    engine ◀── EngineWire.push, fingerprints compared ◀───┘

Calls of `update` take as long as their budget says, on average: what one takes longer, the next ones train less.
Whether there is anything to win is asked of what the engine accepts (drift.py): a drafter that holds is not trained.
The budget is the host's to give, so the cost that a gain has to exceed is that of publishing alone.

Nothing raises into the host: what fails is counted in `draft/failures`, told once in the log, and ends training if it
fails a few times in a row. The engine then goes on with the drafter that it has. The engine's own counters name the
version of its drafter: one that has started anew has another than the published one, which is then pushed again.
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
from paceline.drafters.comparison import compare
from paceline.drafters.drift import DriftMonitor, Verdict
from paceline.drafters.failures import MAX_FAILURES, Failures
from paceline.drafters.packing import Document
from paceline.drafters.provenance import Provenance, write_provenance
from paceline.drafters.trainer import WEIGHTS, DrafterTrainer, Schedule, State, load_weights, trained
from paceline.files import OwnedDirectory, remove_directory
from paceline.integrations.engine_wire import EngineWire
from paceline.metrics import Metrics
from paceline.orchestrator.engine_counters import Differences, since

if TYPE_CHECKING:
    from paceline.drafters.checkpoint import Drafter

logger = logging.getLogger(__name__)

_MOST_OVERDRAWN_S = 60.0
"""Most that later calls make up for. A process that was stopped for an hour, as on a laptop that sleeps, would not
train again before an hour's worth of budgets has passed."""


class DrafterUpdater:
    """Trains and publishes the drafter of one engine. No method raises."""

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
        """`checkpoint` is what the engine has loaded, or else what it gets first; `draft_length` is the longest that it
        drafts."""
        self._wire, self._checkpoint, self._config = wire, checkpoint, config
        self._draft_length, self._seed = draft_length, seed
        self._directory: OwnedDirectory | None = None
        self._buffer: Buffer | None = None
        self._trainer: DrafterTrainer | None = None
        self._judged: Drafter | None = None
        """A second model, to evaluate and to publish."""
        self._published: State = {}
        self._version = 0 if loaded else -1
        """The version that the engine has; 0 is the checkpoint, and -1 none that an engine names."""
        self._num_rounds = self._num_tokens = self._fresh_tokens = 0
        self._overdrawn_s = 0.0
        """What was spent beyond the budget so far."""
        self._drift = DriftMonitor(config.drift)
        self._observed = False
        self._totals: Mapping[str, float] = {}
        self._differences = Differences()
        self._failures = Failures(
            lambda what, error: logger.error(
                "drafter training failed (%s); the engine goes on with the drafter that it has", what, exc_info=error
            ),
            lambda what: logger.warning(
                "drafter training given up after %d failures in a row (%s)", MAX_FAILURES, what
            ),
        )
        self._step: dict[str, float] = {}
        """Metrics since they were last taken."""

    def add(self, documents: Sequence[Document], version: int) -> None:
        """Keep rollouts of this version of the policy, with its hidden states."""
        with self._failures.contained("add"):
            if self.given_up:
                return
            if self._buffer is None:
                self._directory = OwnedDirectory(self._config.buffer.directory / f"paceline-{os.getuid()}")
                self._buffer = Buffer(self._directory.path, self._config.buffer, writer="host")
            self._buffer.put(documents, version)

    def update(self, head_VD: torch.Tensor, budget_s: float) -> None:
        """Follow the engine, then train for about so long and publish what is better. `head_VD` is the output head of
        the policy as it is now."""
        with self._failures.contained("observe"):
            self._observe()
        if not self._wanted():
            return
        with self._failures.contained("start"):
            self._follow(head_VD)  # importing and loading takes seconds, once, which no budget foresees
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
        """Metrics since the last call, under the names of metrics.jsonl."""
        step, self._step = self._step, {}
        failures, self._failures.num = self._failures.num, 0
        trainer, buffer = self._trainer, self._buffer
        return {
            "draft/failures": float(failures),
            **self._drift.decide().metrics(),
            **step,
            "draft/tokens_trained": float(self._num_tokens),
            "draft/round": float(self._num_rounds),
            "draft/published_round": float(max(0, self._version)),
            "draft/skipped_steps": float(0 if trainer is None else trainer.num_skipped),
            "draft/broken_buffer_files": float(0 if buffer is None else buffer.num_broken),
        }

    def save(self, directory: Path, provenance: Provenance) -> None:
        """Write the drafter that the engine has as a checkpoint, in place of an older one; nothing if none was ever
        published."""
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
        """Whether failures have ended training."""
        return self._failures.given_up

    @property
    def num_tokens(self) -> int:
        """Tokens trained on."""
        return self._num_tokens

    def _observe(self) -> None:
        """Take in what the engine has counted, and push again what it has lost."""
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
        """Load the drafter to compare with, and to publish."""
        if self._judged is None:
            with torch.random.fork_rng(devices=[]):  # the host's random numbers stay as they would have been
                self._judged = load(self._checkpoint)
            self._published = {f"{WEIGHTS}{name}": w.detach().clone() for name, w in trained(self._judged).items()}
        return self._judged

    def _follow(self, head_VD: torch.Tensor) -> None:
        """Go on with the head of the present policy."""
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
        trainer.drop_queue()  # what a failure has left
        while time.monotonic() < deadline_s:
            rng = np.random.default_rng([self._seed, self._num_tokens])
            documents = self._buffer.draw(self._config.tokens_per_step, rng)
            if not documents:
                break
            trainer.submit(documents)
            trainer.run(lambda: False)
            num_tokens = sum(len(document.token_ids) for document in documents)
            self._num_tokens += num_tokens
            self._fresh_tokens += num_tokens
        self._step |= trainer.take_metrics()

    def _judge(self, trainer: DrafterTrainer, head_VD: torch.Tensor) -> None:
        """Compare what was trained with what the engine has, publish it if it is better, drop it if it is worse."""
        assert self._buffer is not None
        judged, drift, candidate = self._start(), self._config.drift, State()

        def states() -> Iterator[State]:
            yield self._published
            candidate.update(trainer.state_dict())
            yield candidate

        verdict = compare(
            judged,
            states(),
            self._buffer.heldout(drift.heldout_tokens),
            head_VD,
            draft_length=self._draft_length,
            config=drift,
        )
        if verdict is None:
            return  # the next steps bring more held-out rollouts
        self._step |= verdict.metrics()
        self._num_rounds, self._fresh_tokens = self._num_rounds + 1, 0
        logger.info("drafter round %d: %s", self._num_rounds, _told(verdict))
        publish_s = self._push(judged, candidate, after=self._version) if verdict.publish else 0.0
        if not verdict.after >= verdict.before:  # worse, or not a number
            trainer.load_state_dict(self._published)
        self._drift.note_update(verdict, publish_s)

    def _push(self, drafter: Drafter, state: State, *, after: int) -> float:
        """Give the engine these weights, under the version that follows; returns the seconds that it took."""
        began_s = time.monotonic()
        load_weights(drafter, state)
        self._wire.push(after + 1, weights_of(drafter).items(), "drafter")
        self._version, self._published = after + 1, state
        publish_s = time.monotonic() - began_s
        self._count("draft/publish_s", publish_s)
        return publish_s

    def _count(self, key: str, value: float) -> None:
        self._step[key] = self._step.get(key, 0.0) + value


def _told(verdict: Verdict) -> str:
    change = f"accepted length {verdict.before:.2f} -> {verdict.after:.2f} on held-out rollouts"
    return f"{change}, {'published' if verdict.publish else 'not published'} ({verdict.why})"
