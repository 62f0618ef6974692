"""Files of online drafter training: training data, rounds, and a copy of the published drafter.

documents/  written by the learner, read by trainers       rounds/  states, bases and verdicts (rounds.py)
FILE        the last published drafter, for after a crash (saver.py)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from paceline.config import SpeculationConfig
from paceline.drafters.drift import Verdict
from paceline.drafters.provenance import Provenance, write_evaluation, write_provenance
from paceline.drafters.rounds import Rounds, drafter_weights
from paceline.drafters.saver import Saver
from paceline.drafters.worker import documents_in, rounds_in
from paceline.files import ChecksumError


class FileStore:
    """The driver's access to the directory shared with learner and trainers. Only the driver closes rounds."""

    def __init__(self, directory: Path, checkpoint: Path, workers: Sequence[str], config: SpeculationConfig) -> None:
        """`checkpoint` is the initial drafter; `workers` are the names of the trainers."""
        self.rounds = Rounds(rounds_in(directory), checkpoint)
        self._documents, self._checkpoint = documents_in(directory), checkpoint
        self._workers, self._config = workers, config
        self._saver: Saver | None = None

    def has_documents(self) -> bool:
        return any(self._documents.glob("*.head"))

    def round(self) -> int:
        return self.rounds.round()

    def published(self) -> int:
        return self.rounds.published()

    def fresh_tokens(self) -> int:
        return self.rounds.fresh_tokens()

    def close_round(self) -> None:
        self.rounds.close_round()

    def verdict(self, number: int) -> Verdict | None:
        return self.rounds.verdict(number)

    def publish(self, number: int) -> None:
        self.rounds.publish(number)

    def revert(self) -> int:
        try:
            number = self.rounds.revert(self.published())
        except FileNotFoundError:  # damaged, and counted
            number = self.rounds.revert(0)
        self.publish(number)
        return number

    def forget(self) -> None:
        self.rounds.forget(but=self.published())

    def slices_made(self) -> bool:
        newest = max(int(file.name.split("-")[0]) for file in self._documents.glob("*.head"))
        return all(self.rounds.progress(name).finished_version == newest for name in self._workers)

    def training_s(self) -> float:
        return sum(self.rounds.progress(name).training_s for name in self._workers)

    def tokens_trained(self) -> int:
        return sum(self.rounds.progress(name).num_tokens for name in self._workers)

    def keep_in(self, file: Path) -> None:
        self._saver = Saver(file)

    def keep(self, number: int) -> None:
        if self._saver is None:
            return
        try:
            self._saver.save(drafter_weights(self.rounds.file(number)), step=number)
        except ChecksumError:  # the next published one is saved
            self.rounds.num_broken += 1

    def copy_to(self, directory: Path) -> None:
        self.rounds.copy_to(directory)

    def copy_from(self, directory: Path) -> None:
        self.rounds.copy_from(directory)

    def metrics(self) -> Mapping[str, float]:
        progress = [self.rounds.progress(name) for name in self._workers]
        return {
            "draft/skipped_steps": float(sum(worker.num_skipped for worker in progress)),
            "draft/broken_buffer_files": float(
                self.rounds.num_broken + sum(worker.num_broken_files for worker in progress)
            ),
            **({} if self._saver is None else self._saver.counts().metrics()),
        }

    def close(self) -> None:
        if self._saver is not None:
            self._saver.close()

    def save(self, directory: Path, provenance: Provenance | None) -> None:
        """Write the published drafter with its evaluation and `provenance`, to which the run's tokens are added."""
        import torch

        from paceline.drafters.buffer import Buffer
        from paceline.drafters.checkpoint import load, save
        from paceline.drafters.trainer import evaluate, load_weights

        drafter = load(self._checkpoint)
        load_weights(drafter, self.rounds.base(self.published()))
        training = self._config.training
        buffer = Buffer(self._documents, training.buffer)
        documents, head = buffer.heldout(training.heldout_tokens), buffer.head()

        def notes(partial: Path) -> None:
            if provenance is not None:
                num_tokens = provenance.num_tokens + self.tokens_trained()
                write_provenance(partial, replace(provenance, num_tokens=num_tokens))
            if documents and head is not None:
                head_VD = torch.from_numpy(head[1].copy())
                draft_length = self._config.max_draft_length
                write_evaluation(partial, evaluate(drafter, documents, head_VD, draft_length=draft_length))

        save(drafter, directory, tokenizer=self._checkpoint / "tokenizer.json", notes=notes)
