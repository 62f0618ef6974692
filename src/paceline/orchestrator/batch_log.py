"""Log of finished groups and of the groups that each step trained on, since the oldest checkpoint.

    batches/group-00000323.safetensors    the group at this position of the prompts
            step-00000021.json            the groups that step 21 trained on or found dropped, and their rewards
            SHA256SUMS                    one line per file, appended after the file

The learner is deterministic given its seed and counters, so a checkpoint and the logged steps after it reproduce the
policy, and a resumed run samples no rollout twice. A thread writes the log, many files at a time: a file is logged
once SHA256SUMS has its line. A file that does not match its line counts as missing, and its group is sampled again.
"""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from paceline.files import (
    append_checksums,
    private_directory,
    read_checksums,
    remove_partials,
    replace_checksums,
    sha256_of,
)
from paceline.types import Group, GroupId, Prompt, Rollout

_ARRAYS = ("prompt_ids", "token_ids", "logp")
_TIMES = ("started_s", "finished_s")
_SCALARS = tuple(field.name for field in fields(Rollout) if field.name not in (*_ARRAYS, "group_id"))
_MOST_QUEUED = 4096
"""Files that may wait to be written. Beyond that `put` blocks: the disk is slower than sampling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """The groups that one step took, by their positions among the prompts."""

    groups: Sequence[int]
    dropped: Sequence[int]
    """Groups that it found dropped."""
    rewards: list[list[float]]
    """A reward for every rollout of every group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    name: str
    encode: Callable[[], bytes]


class BatchLog:
    """The log of one run. Logged times count from the start of the run, `began_s` on the current clock."""

    def __init__(self, directory: Path, *, began_s: float) -> None:
        """Open the log that an earlier writer left. No other writer may be alive."""
        self._directory = private_directory(directory)
        self._began_s = began_s
        self.num_broken = 0
        """Number of files that did not match their checksums."""
        remove_partials(directory)
        self._checksums = read_checksums(directory)
        for file in directory.iterdir():
            if file.name not in self._checksums:
                file.unlink()
        replace_checksums(directory, self._checksums)
        self._left = dict(self._checksums)
        self._errors: list[Exception] = []
        self._writing = threading.Lock()
        self._queue: queue.Queue[_File | None] = queue.Queue(_MOST_QUEUED)
        self._thread = threading.Thread(target=self._work, name="batch-log", daemon=True)
        self._thread.start()

    def put(self, position: int, group: Group) -> None:
        self._queue.put(_File(name=_group_file(position), encode=partial(self._encoded, group)))

    def put_taken(self, step: int, taken: Taken) -> None:
        self._queue.put(_File(name=f"step-{step:08d}.json", encode=lambda: json.dumps(asdict(taken)).encode()))

    def flush(self) -> list[Exception]:
        """Wait until everything queued is written; return the errors since the last call."""
        self._queue.join()
        errors, self._errors = self._errors, []
        return errors

    def close(self) -> None:
        """Write everything queued and end the thread."""
        self._queue.put(None)
        self._thread.join()

    def group(self, position: int, prompt: Prompt) -> Group | None:
        """Return the group at this position from an earlier writer, or None. `prompt` is the prompt now at this
        position; raise ValueError if the group has another one, because the data must have changed."""
        content = self._read(_group_file(position))
        return None if content is None else self._group(content, prompt)

    def taken(self) -> dict[int, Taken]:
        """Return the records of earlier writers by step."""
        found: dict[int, Taken] = {}
        for name in [name for name in self._left if name.startswith("step-")]:
            content = self._read(name)
            try:
                if content is not None:
                    found[_number(name)] = Taken(**json.loads(content))
            except (TypeError, ValueError):  # written by another version
                self.num_broken += 1
        return found

    def forget(self, *, step: int, num_opened: int, still_open: Collection[int]) -> None:
        """Remove the steps up to `step` and the first `num_opened` groups, except open ones: a checkpoint has them."""

        def covered(name: str) -> bool:
            number = _number(name)
            if name.startswith("group-"):
                return number < num_opened and number not in still_open
            return number <= step

        with self._writing:
            names = [name for name in self._checksums if covered(name)]
            for name in names:
                del self._checksums[name]
            replace_checksums(self._directory, self._checksums)
        for name in names:
            (self._directory / name).unlink(missing_ok=True)

    def _work(self) -> None:
        while True:
            files = [self._queue.get()]
            with suppress(queue.Empty):
                while True:
                    files.append(self._queue.get_nowait())
            try:
                self._write([file for file in files if file is not None])
            except Exception as error:  # noqa: BLE001  `flush` returns it to the run
                self._errors.append(error)
            for _ in files:
                self._queue.task_done()
            if None in files:
                return

    def _write(self, files: Sequence[_File]) -> None:
        """Write files without waiting for the disk: after a power failure, missing groups are sampled again."""
        with self._writing:
            written: dict[str, str] = {}
            for file in files:
                content = file.encode()
                try:
                    _write_private(self._directory / file.name, content)
                except OSError as error:
                    self._errors.append(error)
                else:
                    written[file.name] = sha256_of([content])
            append_checksums(self._directory, written)
            self._checksums |= written

    def _read(self, name: str) -> bytes | None:
        file = self._directory / name
        if name not in self._left or not file.exists():
            return None
        content = file.read_bytes()
        if sha256_of([content]) == self._left[name]:
            return content
        self.num_broken += 1
        return None

    def _encoded(self, group: Group) -> bytes:
        rollouts = group.rollouts
        tensors = {
            "prompt_ids": group.prompt.token_ids,
            "token_ids": np.concatenate([rollout.token_ids for rollout in rollouts]),
            "logp": np.concatenate([rollout.logp for rollout in rollouts]),
            "lengths": np.array([len(rollout.token_ids) for rollout in rollouts], np.int64),
        }
        columns = {name: [getattr(rollout, name) for rollout in rollouts] for name in _SCALARS}
        columns |= {name: [time_s - self._began_s for time_s in columns[name]] for name in _TIMES}
        metadata = {"group_id": str(group.group_id), "prompt": group.prompt.id, "rollouts": json.dumps(columns)}
        return save(tensors, metadata)

    def _group(self, content: bytes, prompt: Prompt) -> Group | None:
        if (logged := _decoded(content, began_s=self._began_s)) is None:
            self.num_broken += 1
            return None
        if logged.prompt.id != prompt.id or not np.array_equal(logged.prompt.token_ids, prompt.token_ids):
            raise ValueError(
                f"data: got prompt {prompt.id!r} where the log of this run has {logged.prompt.id!r} or other tokens; "
                "must be the data that it began with because logged rollouts belong to its prompts"
            )
        return replace(logged, prompt=prompt)


def read_group(directory: Path, position: int) -> Group | None:
    """Return a group from the log of a run, which may be going. Its prompt has neither text nor row."""
    name = _group_file(position)
    try:
        content = (directory / name).read_bytes()
    except FileNotFoundError:
        return None
    return _decoded(content) if read_checksums(directory).get(name) == sha256_of([content]) else None


def _decoded(content: bytes, *, began_s: float = 0.0) -> Group | None:
    """Return a group with the logged part of its prompt; None if another version wrote it."""
    try:
        tensors = load(content)
        # The first 8 bytes are the length of the header.
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    except (SafetensorError, ValueError):
        return None
    metadata: Mapping[str, str] = header["__metadata__"]
    prompt = Prompt(id=metadata["prompt"], text="", token_ids=tensors["prompt_ids"], row={})
    ends = np.cumsum(tensors["lengths"])[:-1]
    tokens, logp = np.split(tensors["token_ids"], ends), np.split(tensors["logp"], ends)
    columns: dict[str, list[Any]] = json.loads(metadata["rollouts"])
    columns |= {name: [time_s + began_s for time_s in columns[name]] for name in _TIMES}
    columns["version_spans"] = [tuple((version, num) for version, num in spans) for spans in columns["version_spans"]]
    columns |= {"token_ids": tokens, "logp": logp}
    group_id = GroupId.parse(metadata["group_id"])
    rollouts = [
        Rollout(group_id=group_id, prompt_ids=prompt.token_ids, **dict(zip(columns, row, strict=True)))
        for row in zip(*columns.values(), strict=True)
    ]
    return Group(group_id=group_id, prompt=prompt, rollouts=tuple(rollouts))


def _group_file(position: int) -> str:
    return f"group-{position:08d}.safetensors"


def _number(name: str) -> int:
    return int(name.partition(".")[0].rpartition("-")[2])


def _write_private(file: Path, content: bytes) -> None:
    with os.fdopen(os.open(file, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as stream:
        stream.write(content)
