"""Reader of rollouts that another program writes into a directory as JSON lines.

    {"prompt_ids": [5, 6], "response_ids": [7, 8]}                       token ids of the engine
    {"prompt": "12 + 7 = ", "response": "19"}                            text, for the policy's tokenizer; a prompt may
    {"prompt": [{"role": "user", "content": "..."}], "response": "19"}   be messages for its chat template
    {"input": "12 + 7 = ", "output": "19"}                               verl's format

Files `*.jsonl` may grow, be moved in or be renamed: inodes identify them, and each line is read once. An unfinished
last line is read later. Invalid lines are counted and skipped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import numpy as np

from paceline.orchestrator.task import make_prompt
from paceline.types import Sample, Tokenizer, Tokens

_IDS = ("prompt_ids", "response_ids")
_TEXTS = (("prompt", "response"), ("input", "output"))
_LOOK_BYTES = 64 * 2**20
"""Limit of a read. The oldest part of a larger backlog is skipped, since it shows an older policy."""


_Inode = tuple[int, int]
"""Device and inode."""


class RolloutReader:
    """Parse lines into samples."""

    def __init__(self, tokenizer: Callable[[], Tokenizer], *, vocabulary: int, longest: int) -> None:
        """`tokenizer` is called at the first line with text. `longest` is the maximum length of a rollout."""
        self._make_tokenizer = tokenizer
        self._tokenizer: Tokenizer | None = None
        self._vocabulary, self._longest = vocabulary, longest

    def sample(self, line: bytes) -> Sample:
        """Return the rollout of a line; raise ValueError if it is invalid."""
        try:
            row = json.loads(line.decode("utf-8-sig"))
        except RecursionError:
            raise ValueError("nested too deeply") from None
        if not isinstance(row, dict):
            raise ValueError("not a JSON object")
        prompt, response = self._tokens(cast("dict[str, Any]", row))
        if not len(prompt) or not len(response):
            raise ValueError("prompt or response has no tokens")
        if len(prompt) + len(response) > self._longest:
            raise ValueError(f"{len(prompt) + len(response)} tokens, and the policy has {self._longest} positions")
        return Sample(
            token_ids=np.concatenate([prompt, response]),
            num_prompt_tokens=len(prompt),
            logp=np.zeros(len(response), np.float32),
            advantage=0.0,
        )

    def _tokens(self, row: dict[str, Any]) -> tuple[Tokens, Tokens]:
        if all(key in row for key in _IDS):
            prompt, response = (self._ids(key, row[key]) for key in _IDS)
            return prompt, response
        for prompt_key, response_key in _TEXTS:
            if prompt_key in row and isinstance(text := row.get(response_key), str):
                if self._tokenizer is None:
                    self._tokenizer = self._make_tokenizer()
                prompt = make_prompt("", row[prompt_key], row, self._tokenizer).token_ids
                return prompt, self._ids(response_key, self._tokenizer.encode(text, add_special_tokens=False))
        raise ValueError(f"it has {sorted(row)[:8]}; must have {' and '.join(_IDS)}, or prompt and response as text")

    def _ids(self, key: str, ids: object) -> Tokens:
        if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < self._vocabulary for token in ids):
            raise ValueError(f"{key}: must be a list of token ids below {self._vocabulary}")
        return np.array(ids, np.int32)


class RolloutFiles:
    """New rollouts in a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read_to: dict[_Inode, int] = {}
        self.num_broken = 0
        """Invalid lines."""
        self.num_skipped_bytes = 0
        """Bytes skipped because of a backlog."""
        self.problem = ""
        """File and error of the last invalid line."""

    def take(self, reader: RolloutReader) -> list[Sample]:
        """Return the rollouts since the last call, the newest file last."""
        parts: list[list[Sample]] = []
        room = _LOOK_BYTES
        for file, inode, size in self._found():
            try:
                content = self._unread(file, inode, size, room)
            except FileNotFoundError:  # moved away meanwhile
                continue
            room -= len(content)
            parts.append(list(self._samples(file, content, reader)))
        return [sample for part in reversed(parts) for sample in part]

    def _found(self) -> list[tuple[Path, _Inode, int]]:
        """List files and sizes, newest first, and forget removed files, because inodes are reused."""
        found: list[tuple[int, Path, _Inode, int]] = []
        for file in self._directory.glob("*.jsonl"):
            with suppress(FileNotFoundError):  # as above
                status = file.stat()
                found.append((status.st_mtime_ns, file, (status.st_dev, status.st_ino), status.st_size))
        self._read_to = {inode: self._read_to.get(inode, 0) for _, _, inode, _ in found}
        return [(file, inode, size) for _, file, inode, size in sorted(found, reverse=True)]

    def _unread(self, file: Path, inode: _Inode, size: int, room: int) -> bytes:
        """Read the new complete lines of a file, at most the last `room` bytes."""
        start = self._read_to[inode] if self._read_to[inode] <= size else 0  # shorter than before: rewritten
        begin = max(start, size - room)
        with file.open("rb") as stream:
            stream.seek(begin)
            content = stream.read(size - begin)
        if begin > start:  # in the middle of a line
            begin += content.find(b"\n") + 1
            content = content[len(content) - (size - begin) :]
            self.num_skipped_bytes += begin - start
        whole = content.rfind(b"\n") + 1
        self._read_to[inode] = begin + whole
        return content[:whole]

    def _samples(self, file: Path, content: bytes, reader: RolloutReader) -> Iterator[Sample]:
        for line in content.split(b"\n"):
            if not line.strip():
                continue
            try:
                yield reader.sample(line)
            except ValueError as error:
                self.num_broken += 1
                self.problem = f"{file}: {line[:60].decode(errors='replace')!r}: {error}"
