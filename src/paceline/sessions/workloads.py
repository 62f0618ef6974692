"""Resolve the policy, drafter and data that a config names.

resolve_policy("arena:small", context)            # included in the package, or built once and cached
resolve_policy("checkpoints/qwen3", context)      # a directory
resolve_policy("Qwen/Qwen3-8B", context)          # a Hugging Face name, downloaded once and cached
resolve_drafter("arena:small/eagle3", context)    # the drafter of an arena policy
"""

from __future__ import annotations

import re
from pathlib import Path

from paceline.arena.prompts import arena_task
from paceline.config import ArenaData, Config
from paceline.context import Context
from paceline.files import verify_checksums
from paceline.orchestrator.task import Task, load_task
from paceline.types import Tokenizer

_FILES = ["*.json", "*.jinja", "*.safetensors", "*.txt", "tokenizer.model"]


def arena_policy(model: str) -> str | None:
    """Return the name of an arena policy, without its prefix, or None for a checkpoint."""
    prefix, colon, name = model.partition(":")
    return name if prefix == "arena" and colon else None


def resolve_policy(model: str, context: Context) -> Path:
    """Return the checkpoint directory of a policy, and verify its checksums if there are any."""
    from paceline.arena import policy

    if (name := arena_policy(model)) is not None:
        return policy.find(name, context)
    path = _directory(model, "policy.model")
    for file in ("config.json", "tokenizer.json"):
        if not (path / file).is_file():
            names = ", ".join(f"arena:{name}" for name in policy.NAMES)
            raise ValueError(
                f"policy.model: got {model!r}, which has no {file}; must be a Hugging Face checkpoint or one of {names}"
            )
    verify_checksums(path)
    return path


def resolve_drafter(path: str, context: Context) -> Path:
    from paceline.arena import drafter

    if (named := arena_policy(path)) is None:
        return _directory(path, "speculation.drafter.path")
    policy, _, kind = named.partition("/")
    return drafter.find(policy, kind, context)


def _directory(name: str, key: str) -> Path:
    """Return a directory, or the local copy of a Hugging Face repository."""
    path = Path(name)
    if path.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_FILES))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{key}: got {name!r}, which is not a directory here and cannot be downloaded ({error}); must be a "
            "checkpoint directory or a Hugging Face name"
        ) from None


def make_task(config: Config, tokenizer: Tokenizer) -> Task:
    """Return the prompts and reward of `config.data`, by default the arena's."""
    num_heldout = config.eval.num_prompts if config.eval.every else 0
    data = config.data or ArenaData()
    if isinstance(data, ArenaData):
        return arena_task(tokenizer, seed=data.seed + config.run.seed, num_heldout=num_heldout)
    room = config.rollout.engine.max_model_len - config.rollout.max_tokens
    return load_task(data, tokenizer, seed=config.run.seed, num_heldout=num_heldout, max_prompt_tokens=room)
