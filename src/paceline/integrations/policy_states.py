"""Hidden states of a policy that another program trains, from the checkpoints that it saves.

    directories ── the newest whole checkpoint ──▶ FsdpLearner ── forward pass over rollouts ──▶ documents, output head

A checkpoint is older than the policy that drew the rollouts. That costs the drafter some acceptance, and nothing else:
what is sampled is the policy's in any case.
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
from paceline.drafters.checkpoint import read_taps
from paceline.drafters.packing import Document
from paceline.files import verify_checksums
from paceline.learner.fsdp import FsdpLearner
from paceline.learner.hidden_states import CHUNK_ROLLOUTS, HiddenStateTap, choose
from paceline.types import Sample

_SETTLED_S = 2.0
"""Seconds for which a checkpoint must not have been written to."""
_DEPTH = 3
"""How far below its directory a checkpoint may be: verl's are in global_step_N/actor/huggingface."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPolicy:
    """A checkpoint as it was found."""

    path: Path
    written_s: float
    """When the last of its weights was written."""


def newest_policy(directories: Iterable[Path]) -> SavedPolicy | None:
    """Find the checkpoint that was written last, in the directories or below them; None if there is no whole one."""
    found = [saved for directory in directories for saved in _saved(directory)]
    settled = [saved for saved in found if saved.written_s < time.time() - _SETTLED_S]
    newest_first = sorted(settled, key=lambda saved: saved.written_s, reverse=True)
    return next((saved for saved in newest_first if _is_whole(saved.path)), None)


def _saved(directory: Path) -> Iterator[SavedPolicy]:
    for depth in range(_DEPTH + 1):
        for config in directory.glob("*/" * depth + "config.json"):
            weights = config.parent.glob("*.safetensors")
            with suppress(FileNotFoundError):  # a trainer that keeps a few checkpoints only removes the others
                written_s = max((file.stat().st_mtime for file in weights), default=None)
                if written_s is not None and _is_policy(config):
                    yield SavedPolicy(path=config.parent, written_s=written_s)


def _is_policy(config: Path) -> bool:
    """Whether this is not the config of a drafter, or of a model that gives values or rewards."""
    try:
        tree = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # being written
        return False
    return "speculators_model_type" not in tree and "Classification" not in str(tree.get("architectures"))


def _is_whole(path: Path) -> bool:
    """Whether all parts of the weights are there, in their full length."""
    index = path / "model.safetensors.index.json"
    try:
        wanted = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()) if index.is_file() else set()
        for name in wanted | {file.name for file in path.glob("*.safetensors")}:
            with safe_open(path / name, "pt"):  # compares its length with what its header says
                pass
    except (OSError, ValueError, SafetensorError):
        return False
    return True


class PolicyStates:
    """The newest policy that could be loaded, and its hidden states for a drafter."""

    def __init__(self, directories: Sequence[Path], drafter: Path, config: LearnerConfig) -> None:
        self._directories, self._drafter, self._config = directories, drafter, config
        self._learner: FsdpLearner | None = None
        self._tap: HiddenStateTap | None = None
        self._seen: SavedPolicy | None = None
        self.head_VD: torch.Tensor | None = None
        """Output head; None before the first policy."""
        self.path: Path | None = None
        """The checkpoint that is loaded."""
        self.version = 0
        """Number of policies that were loaded so far."""
        self.num_failures = 0
        """Checkpoints that could not be loaded."""

    def follow(self) -> bool:
        """Load the newest policy unless it is loaded already; True if that was done.

        Raises what is wrong with a new checkpoint, once, and goes on with the one before it if that is still there."""
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
        """Make documents of as many samples as the buffer takes at a time, the last of them first, until this time on
        the monotonic clock; of none while no policy is loaded."""
        documents: list[Document] = []
        if self._learner is None or self._tap is None:
            return documents
        chosen = choose(
            samples,
            num_taps=self._tap.num_taps,
            hidden_size=self._learner.hidden_size,
            share=config.step_share,
            budget_bytes=config.step_mb * 2**20,
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
        gc.collect()  # two policies may not fit

    def _load(self, path: Path) -> None:
        self.close()
        verify_checksums(path)
        learner = FsdpLearner(path, self._config, ObjectiveConfig(), temperature=1.0)
        self._learner, self.path = learner, path
        self._tap = HiddenStateTap(learner, read_taps(self._drafter, path))
        _, self.head_VD = learner.embedding_and_head()
