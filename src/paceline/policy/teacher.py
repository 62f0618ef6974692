"""The policy as the drafter's teacher: what its log-probability pass hands over to drafter training, and how much of it.

    samples ──▶ choose: a share of them, within a byte budget ──▶ Teacher.score: one pass ──▶ log-probabilities, documents
                                                                                                                  │
                                                                                    draft/buffer.py ◀── put ──────┘

The hidden states are by-products of a pass that the policy update needs in any case. They are detached copies in host memory: no
gradient and no write of drafter training can reach the policy.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.config import BufferConfig
from paceline.draft.buffer import Buffer, document_bytes
from paceline.draft.lesson import Document
from paceline.policy.batch import draw
from paceline.policy.learner import FsdpLearner, LogpResult
from paceline.types import Floats, Sample


class Teacher:
    """One rank of the learner with the drafter's taps in it. `score` is collective, as `FsdpLearner.logp` is."""

    def __init__(self, learner: FsdpLearner, taps: Sequence[int]) -> None:
        self._learner = learner
        self._taps = tuple(taps)

    def score(self, samples: Sequence[Sample], chosen: Collection[int]) -> tuple[LogpResult, list[Document]]:
        """Scores of all samples, and documents of those chosen samples that this rank computed."""
        result = self._learner.logp(samples, taps=self._taps, tapped=chosen)
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
        """In the order of the samples, where there is one rank."""
        return self.score(samples, range(len(samples)))[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOverSettings:
    directory: Path
    """Of the buffer."""
    taps: tuple[int, ...]
    buffer: BufferConfig


class HandOver:
    """The log-probability pass of one rank, with what drafter training takes from it."""

    def __init__(self, learner: FsdpLearner, settings: HandOverSettings, *, rank: int, seed: int) -> None:
        self._teacher = Teacher(learner, settings.taps)
        self._learner = learner
        self._settings = settings
        self._buffer = Buffer(settings.directory, settings.buffer, writer=f"rank{rank}")
        self._rank, self._seed = rank, seed
        self._version = 0
        self.num_failures = 0

    def logp(self, samples: Sequence[Sample]) -> Sequence[Floats]:
        """Scores of all samples; some go into the buffer. One that cannot be written costs the drafter its lesson, not the run."""
        self._version += 1
        config, taps = self._settings.buffer, self._settings.taps
        chosen = choose(
            samples,
            num_taps=len(taps),
            hidden_size=self._learner.hidden_size,
            share=config.step_share,
            budget_bytes=config.step_mb * 2**20,
            seed=(self._seed, self._version),
        )
        result, documents = self._teacher.score(samples, chosen)
        _, head_VD = self._learner.ends()
        try:
            self._buffer.put(documents, self._version)
            if self._rank == 0:
                self._buffer.put_head(head_VD.numpy(), self._version)
        except OSError:
            self.num_failures += 1
        return result.logp


def choose(
    samples: Sequence[Sample], *, num_taps: int, hidden_size: int, share: float, budget_bytes: float, seed: Sequence[int]
) -> list[int]:
    """Samples to hand over, the same on every rank."""
    sizes = [document_bytes(len(sample.token_ids), num_taps, hidden_size) for sample in samples]
    fitting = draw(sizes, budget_bytes, np.random.default_rng(list(seed)))
    return sorted(fitting[: round(share * len(samples))])
