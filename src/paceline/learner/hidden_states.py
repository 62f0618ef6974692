"""Record the policy's hidden states for drafter training during the pass that scores rollouts.

    samples ──▶ choose: a share within a byte budget ──▶ HiddenStateTap.score: one pass ──▶ log-probabilities
                                                                                       └──▶ documents
                                                         drafters/buffer.py ◀── HiddenStateWriter ──┘

The hidden states are detached copies in host memory: no gradient or write of drafter training can reach the policy.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.config import BufferConfig, CorrectionConfig
from paceline.drafters.buffer import Buffer, document_bytes, step_bytes
from paceline.drafters.packing import Document
from paceline.learner.batch import draw
from paceline.learner.fsdp import FsdpLearner
from paceline.learner.scoring import RankScores
from paceline.types import Sample

CHUNK_ROLLOUTS = 64
"""Rollouts per pass for callers that process many."""

SHARE = 0.5
"""Share of a step's rollouts to write if the buffer allows: each adds to the log-probability pass."""


class HiddenStateTap:
    """Scores samples on one learner rank and records the hidden states at the drafter's taps."""

    def __init__(self, learner: FsdpLearner, taps: Sequence[int]) -> None:
        self._learner = learner
        self._taps = tuple(taps)

    @property
    def num_taps(self) -> int:
        return len(self._taps)

    def score(
        self, samples: Sequence[Sample], chosen: Collection[int], correction: CorrectionConfig | None = None
    ) -> tuple[RankScores, list[Document]]:
        """Score all samples, and return documents of the chosen samples that this rank computed. Collective."""
        result = self._learner.score(samples, taps=self._taps, tapped=chosen, correction=correction)
        documents = [
            Document(
                token_ids=samples[i].token_ids,
                num_prompt_tokens=samples[i].num_prompt_tokens,
                taps=result.states[i].taps,
                last=result.states[i].last,
            )
            for i in sorted(result.states)
        ]
        return result, documents

    def all_documents(self, samples: Sequence[Sample]) -> list[Document]:
        """Return documents of all samples, in order. Single rank only."""
        return self.score(samples, range(len(samples)))[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenStateWriterSettings:
    directory: Path
    taps: tuple[int, ...]
    buffer: BufferConfig


class HiddenStateWriter:
    """Scores rollouts on one rank and writes a share of them with hidden states into the drafter's buffer."""

    def __init__(self, learner: FsdpLearner, settings: HiddenStateWriterSettings, *, rank: int, seed: int) -> None:
        self._tap = HiddenStateTap(learner, settings.taps)
        self._learner = learner
        self._settings = settings
        self._buffer = Buffer(settings.directory, settings.buffer, writer=f"rank{rank}")
        self._rank, self._seed = rank, seed
        self.num_failures = 0
        """Number of failed writes."""

    def score(self, samples: Sequence[Sample], correction: CorrectionConfig | None = None) -> RankScores:
        """Score all samples and write some of them. A failed write loses training data, not the run. Collective."""
        version = self._learner.num_updates  # part of the saved state, so a resumed run makes the same choice
        config, taps = self._settings.buffer, self._settings.taps
        chosen = choose(
            samples,
            num_taps=len(taps),
            hidden_size=self._learner.hidden_size,
            share=SHARE,
            budget_bytes=step_bytes(config),
            seed=(self._seed, version),
        )
        result, documents = self._tap.score(samples, chosen, correction)
        _, head_VD = self._learner.embedding_and_head()
        try:
            self._buffer.put(documents, version)
            if self._rank == 0:
                self._buffer.put_head(head_VD.cpu().numpy(), version)
        except OSError:
            self.num_failures += 1
        return result

    def counters(self) -> dict[str, float]:
        return {"draft/hand_over_failures": float(self.num_failures)}


def choose(
    samples: Sequence[Sample],
    *,
    num_taps: int,
    hidden_size: int,
    share: float,
    budget_bytes: float,
    seed: Sequence[int],
) -> list[int]:
    """Choose samples to write, the same on every rank."""
    sizes = [document_bytes(len(sample.token_ids), num_taps, hidden_size) for sample in samples]
    fitting = draw(sizes, budget_bytes, np.random.default_rng(list(seed)))
    return sorted(fitting[: round(share * len(samples))])
