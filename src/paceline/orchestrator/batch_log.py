"""The log of what was sampled: finished groups, and which of them each step took, until a checkpoint covers them.

    batches/group-00000323-SHA256.safetensors    the group at this position of the prompts, written when it has finished
            step-00000021-SHA256.json            the groups that step 21 took or found dropped, and their rewards

The learner draws nothing at random that does not follow from its seed and counters, so a checkpoint and what the steps
since then took make the policy again, and a run that goes on samples no rollout twice. A file carries its checksum in
its name: one that does not verify is as good as missing, and its group is sampled again.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from paceline.files import atomic_file, private_directory, remove_partials, sha256_of
from paceline.types import Group, GroupId, Prompt, Rollout

_ARRAYS = ("prompt_ids", "token_ids", "logp")
_TIMES = ("started_s", "finished_s")
_SCALARS = tuple(field.name for field in fields(Rollout) if field.name not in (*_ARRAYS, "group_id"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What one step took."""

    groups: Sequence[int]
    """Positions of the groups that it trained on."""
    dropped: Sequence[int]
    """Positions of those that it found dropped."""
    rewards: list[list[float]]
    """One for every rollout of every group."""


class BatchLog:
    """One run's log. Times in it count from the beginning of the run, which `began_s` is on the present clock."""

    def __init__(self, directory: Path, *, began_s: float) -> None:
        """Look what an earlier writer has left; the caller knows that none is alive."""
        self._directory = private_directory(directory)
        self._began_s = began_s
        self.num_broken = 0
        """Files that did not verify."""
        remove_partials(directory)
        self._left: dict[str, list[Path]] = defaultdict(list)
        for file in sorted(directory.glob("[gs]*-*-*")):
            self._left[file.name.rpartition("-")[0]].append(file)

    def put(self, position: int, group: Group) -> None:
        """Keep a finished group."""
        rollouts = group.rollouts
        tensors = {
            "prompt_ids": group.prompt.token_ids,
            "token_ids": np.concatenate([rollout.token_ids for rollout in rollouts]),
            "logp": np.concatenate([rollout.logp for rollout in rollouts]),
            "lengths": np.array([len(rollout.token_ids) for rollout in rollouts], np.int64),
        }
        scalars = [{name: getattr(rollout, name) for name in _SCALARS} for rollout in rollouts]
        for row in scalars:
            row |= {name: row[name] - self._began_s for name in _TIMES}
        metadata = {"group_id": str(group.group_id), "prompt": group.prompt.id, "rollouts": json.dumps(scalars)}
        self._write(f"group-{position:08d}", ".safetensors", save(tensors, metadata))

    def group(self, position: int, prompt: Prompt) -> Group | None:
        """A group that an earlier writer has left, or None. `prompt` is the one at this position, drawn again; a group
        of another one raises ValueError, because the data must have changed."""
        content = self._read(f"group-{position:08d}", ".safetensors")
        return None if content is None else self._group(content, prompt)

    def put_taken(self, step: int, taken: Taken) -> None:
        self._write(f"step-{step:08d}", ".json", json.dumps(asdict(taken)).encode())

    def taken(self) -> dict[int, Taken]:
        """What each step took, as far as an earlier writer has left it."""
        names = [name for name in self._left if name.startswith("step-")]
        found: dict[int, Taken] = {}
        for name in names:
            content = self._read(name, ".json")
            try:
                if content is not None:
                    found[int(name.removeprefix("step-"))] = Taken(**json.loads(content))
            except (TypeError, ValueError):  # written by another version
                self.num_broken += 1
        return found

    def forget(self, *, step: int, num_opened: int, still_open: Collection[int]) -> None:
        """Remove what a checkpoint of this step covers: of the first `num_opened` groups all that are not open."""
        for file in self._directory.glob("[gs]*-*-*"):
            kind, number, _ = file.name.split("-")
            covered = int(number) < num_opened and int(number) not in still_open
            if covered if kind == "group" else int(number) <= step:
                file.unlink(missing_ok=True)

    def _write(self, name: str, suffix: str, content: bytes) -> None:
        # No wait for the disk: what a power failure takes is sampled again.
        file = self._directory / f"{name}-{sha256_of([content])}{suffix}"
        with atomic_file(file, private=True) as partial:
            partial.write_bytes(content)
        for old in self._left.pop(name, ()):
            if old != file:
                old.unlink(missing_ok=True)

    def _read(self, name: str, suffix: str) -> bytes | None:
        for file in self._left.get(name, ()):
            content = file.read_bytes()
            if file.name == f"{name}-{sha256_of([content])}{suffix}":
                return content
            self.num_broken += 1
            file.unlink(missing_ok=True)
        return None

    def _group(self, content: bytes, prompt: Prompt) -> Group | None:
        try:
            tensors = load(content)
            # The header's length stands in its first 8 bytes.
            header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        except (SafetensorError, ValueError):  # written by another version
            self.num_broken += 1
            return None
        metadata: Mapping[str, str] = header["__metadata__"]
        if metadata["prompt"] != prompt.id or not np.array_equal(tensors["prompt_ids"], prompt.token_ids):
            raise ValueError(
                f"data: prompt {prompt.id!r} stands where the log of this run has {metadata['prompt']!r} or other "
                "tokens; a run can only go on with the data that it began with"
            )
        ends = np.cumsum(tensors["lengths"])[:-1]
        tokens, logp = np.split(tensors["token_ids"], ends), np.split(tensors["logp"], ends)
        group_id = GroupId.parse(metadata["group_id"])
        rollouts = [
            self._rollout(row | {"group_id": group_id}, prompt, tokens[index], logp[index])
            for index, row in enumerate(json.loads(metadata["rollouts"]))
        ]
        return Group(group_id=group_id, prompt=prompt, rollouts=tuple(rollouts))

    def _rollout(self, row: dict[str, Any], prompt: Prompt, token_ids: Any, logp: Any) -> Rollout:
        changed: dict[str, Any] = {name: row[name] + self._began_s for name in _TIMES}
        changed["version_spans"] = tuple((version, num_tokens) for version, num_tokens in row["version_spans"])
        return Rollout(**{**row, **changed}, prompt_ids=prompt.token_ids, token_ids=token_ids, logp=logp)
