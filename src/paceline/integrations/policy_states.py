"""Hidden states of a policy that another program trains, from its saved checkpoints.

    directories ── the newest whole checkpoint ──▶ FsdpLearner ── forward pass over rollouts ──▶ documents, output head

A checkpoint is older than the policy that sampled the rollouts, which lowers the drafter's acceptance rate but never
changes the sampled distribution.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from paceline.config import BufferConfig, LearnerConfig, ObjectiveConfig
from paceline.drafters.buffer import step_bytes
from paceline.drafters.checkpoint import read_taps
from paceline.drafters.packing import Document
from paceline.files import verify_checksums
from paceline.learner.fsdp import FsdpLearner
from paceline.learner.hidden_states import CHUNK_ROLLOUTS, HiddenStateTap, choose
from paceline.types import Sample
from paceline.weights.check import checkpoint_files

_SETTLED_S = 2.0
"""Seconds since the last write before a checkpoint is read."""
_DEPTH = 3
"""Maximum depth of checkpoints below a directory: verl writes global_step_N/actor/huggingface."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPolicy:
    path: Path
    written_s: float
    """Time of the last write to its weights."""


def newest_policy(directories: Iterable[Path]) -> SavedPolicy | None:
    """Return the newest complete checkpoint in or below the directories, or None."""
    found = [saved for directory in directories for saved in _saved(directory)]
    settled = [saved for saved in found if saved.written_s < time.time() - _SETTLED_S]
    newest_first = sorted(settled, key=lambda saved: saved.written_s, reverse=True)
    return next((saved for saved in newest_first if _is_whole(saved.path)), None)


def _saved(directory: Path) -> Iterator[SavedPolicy]:
    for depth in range(_DEPTH + 1):
        for config in directory.glob("*/" * depth + "config.json"):
            weights = config.parent.glob("*.safetensors")
            with suppress(FileNotFoundError):  # removed by a trainer that keeps a few checkpoints
                written_s = max((file.stat().st_mtime for file in weights), default=None)
                if written_s is not None and _is_policy(config):
                    yield SavedPolicy(path=config.parent, written_s=written_s)


def _is_policy(config: Path) -> bool:
    """Return whether this is the config of a policy, not of a drafter, value or reward model."""
    try:
        tree = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # being written
        return False
    return "speculators_model_type" not in tree and "Classification" not in str(tree.get("architectures"))


def _is_whole(path: Path) -> bool:
    """Return whether all weight files exist in full length."""
    try:
        for file in {*checkpoint_files(path), *path.glob("*.safetensors")}:
            with safe_open(file, "pt"):  # compares the length with the header
                pass
    except (OSError, ValueError, SafetensorError):
        return False
    return True


class PolicyStates:
    """The newest loadable policy, and its hidden states for a drafter."""

    def __init__(self, directories: Sequence[Path], drafter: Path, config: LearnerConfig) -> None:
        self._directories, self._drafter, self._config = directories, drafter, config
        self._learner: FsdpLearner | None = None
        self._tap: HiddenStateTap | None = None
        self._seen: SavedPolicy | None = None
        self.head_VD: torch.Tensor | None = None
        """Output head; None before the first policy."""
        self.path: Path | None = None
        """The loaded checkpoint."""
        self.version = 0
        """Number of policies loaded so far."""
        self.num_failures = 0
        """Checkpoints that failed to load."""

    def follow(self) -> bool:
        """Load the newest policy if it is new, and return whether it was.

        Raise the error of a broken checkpoint once, after reloading the previous one if it still exists."""
        saved = newest_policy(self._directories)
        if saved is None or saved == self._seen:
            return False
        self._seen, before = saved, self.path
        try:
            self._load(saved.path)
        except Exception:
            self.num_failures += 1
            if before is not None and newest_policy([before]) is not None:
                self._load(before)
            raise
        self.version += 1
        return True

    def documents(
        self, samples: Sequence[Sample], config: BufferConfig, *, seed: Sequence[int], until_s: float
    ) -> list[Document]:
        """Return documents of as many samples as fit in the buffer, last samples first, until this time on the
        monotonic clock. Without a policy, return none."""
        documents: list[Document] = []
        if self._learner is None or self._tap is None:
            return documents
        chosen = choose(
            samples,
            num_taps=self._tap.num_taps,
            hidden_size=self._learner.hidden_size,
            share=1.0,
            budget_bytes=step_bytes(config),
            seed=seed,
        )
        while chosen and time.monotonic() < until_s:
            chosen, part = chosen[:-CHUNK_ROLLOUTS], chosen[-CHUNK_ROLLOUTS:]
            documents += self._tap.all_documents([samples[i] for i in part])
        return documents

    def close(self) -> None:
        if self._learner is not None:
            self._learner.close()
        self._learner = self._tap = self.path = None
        gc.collect()  # two policies may not fit in memory

    def _load(self, path: Path) -> None:
        self.close()
        verify_checksums(path)
        learner = FsdpLearner(path, self._config, ObjectiveConfig(), temperature=1.0)
        self._learner, self.path = learner, path
        self._tap = HiddenStateTap(learner, read_taps(self._drafter, path))
        _, self.head_VD = learner.embedding_and_head()
