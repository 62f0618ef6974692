"""The log of sampled batches: finished groups and their rewards, kept until a checkpoint covers them.

    batches/step-00000021/00003-SHA256.safetensors    group 3 of the batch of step 21, written when it has finished
                          rewards-SHA256.json         the rewards of the whole batch, in the order of its groups

The learner draws nothing at random that does not follow from its seed and counters, so a checkpoint and the batches
since then make the policy again, and a run that goes on samples no rollout twice. A file carries its checksum in its
name: one that does not verify is as good as missing, and its group is sampled again.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from paceline.files import atomic_file, private_directory, remove_partials, sha256_of
from paceline.types import Group, Prompt, Rollout

_ARRAYS = ("prompt_ids", "token_ids", "logp")
_TIMES = ("started_s", "finished_s")
_SCALARS = tuple(field.name for field in fields(Rollout) if field.name not in _ARRAYS)


class BatchLog:
    """One run's log. Times in it count from the beginning of the run, which `began_s` is on the present clock."""

    def __init__(self, directory: Path, *, began_s: float) -> None:
        self._directory = private_directory(directory)
        self._began_s = began_s
        self.num_broken = 0
        """Files that did not verify."""

    def put(self, step: int, position: int, group: Group) -> None:
        """Keep a finished group, the `position`th of the batch of this step."""
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
        metadata = {"prompt": group.prompt.id, "rollouts": json.dumps(scalars)}
        self._write(step, f"{position:05d}", ".safetensors", save(tensors, metadata))

    def groups(self, step: int, prompts: Sequence[Prompt]) -> dict[int, Group]:
        """Groups of this batch that are in the log, by position. `prompts` are the batch's, drawn again; a group of
        another prompt raises ValueError, because the data must have changed."""
        found: dict[int, Group] = {}
        for position, prompt in enumerate(prompts):
            content = self._read(step, f"{position:05d}", ".safetensors")
            group = None if content is None else self._group(content, prompt)
            if group is not None:
                found[position] = group
        return found

    def put_rewards(self, step: int, rewards: Sequence[Sequence[float]]) -> None:
        self._write(step, "rewards", ".json", json.dumps([list(row) for row in rewards]).encode())

    def rewards(self, step: int) -> list[list[float]] | None:
        """The rewards of this batch; None if they are not in the log."""
        content = self._read(step, "rewards", ".json")
        return None if content is None else json.loads(content)

    def forget(self, *, up_to: int) -> None:
        """Remove batches that checkpoints cover, and what killed writers left."""
        for directory in self._directory.glob("step-*"):
            if int(directory.name.removeprefix("step-")) <= up_to:
                shutil.rmtree(directory, ignore_errors=True)

    def tidy(self) -> None:
        """Remove what killed writers left; the caller knows that no other writer is alive."""
        for directory in self._directory.glob("step-*"):
            remove_partials(directory)

    def _batch(self, step: int) -> Path:
        return self._directory / f"step-{step:08d}"

    def _write(self, step: int, name: str, suffix: str, content: bytes) -> None:
        directory = private_directory(self._batch(step))
        # No wait for the disk: what a power failure takes is sampled again.
        with atomic_file(directory / f"{name}-{sha256_of([content])}{suffix}", private=True) as partial:
            partial.write_bytes(content)

    def _read(self, step: int, name: str, suffix: str) -> bytes | None:
        for file in sorted(self._batch(step).glob(f"{name}-*{suffix}")):
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
        rollouts = [
            self._rollout(row, prompt, tokens[index], logp[index])
            for index, row in enumerate(json.loads(metadata["rollouts"]))
        ]
        return Group(group_id=rollouts[0].group_id, prompt=prompt, rollouts=tuple(rollouts))

    def _rollout(self, row: dict[str, Any], prompt: Prompt, token_ids: Any, logp: Any) -> Rollout:
        times = {name: row[name] + self._began_s for name in _TIMES}
        return Rollout(**{**row, **times}, prompt_ids=prompt.token_ids, token_ids=token_ids, logp=logp)
