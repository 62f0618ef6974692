"""Resolve the policy, drafter and data that a config names: the arena's, or the user's own.

resolve_policy("arena:small", context)            # comes with the package, or is built once and cached
resolve_policy("checkpoints/qwen3", context)      # any other name is a checkpoint directory
resolve_drafter("arena", "arena:small", context)  # the drafter of an arena policy
"""

from __future__ import annotations

from pathlib import Path

from paceline.arena.prompts import arena_task
from paceline.config import ArenaData, Config
from paceline.context import Context
from paceline.files import verify_checksums
from paceline.orchestrator.task import Task, load_task
from paceline.types import Tokenizer


def arena_policy(model: str) -> str | None:
    """Return the name of an arena policy, without its prefix, or None for a checkpoint directory."""
    prefix, colon, name = model.partition(":")
    return name if prefix == "arena" and colon else None


def resolve_policy(model: str, context: Context) -> Path:
    """Return the checkpoint directory of an arena policy, built if it is missing, or of a path; verify checksums if
    there are any."""
    from paceline.arena import policy

    if (name := arena_policy(model)) is not None:
        return policy.find(name, context)
    path = Path(model)
    for file in ("config.json", "tokenizer.json"):
        if not (path / file).is_file():
            names = ", ".join(f"arena:{name}" for name in policy.NAMES)
            raise ValueError(
                f"policy.model: got {model!r}, which has no {file}; must be a Hugging Face checkpoint directory or one "
                f"of {names}"
            )
    verify_checksums(path)
    return path


def resolve_drafter(path: str, model: str, context: Context, *, kind: str = "eagle3") -> Path:
    """Return the directory of a drafter; `arena` as `path` stands for the drafter of the arena policy `model`."""
    if path != "arena":
        return Path(path)
    from paceline.arena import drafter

    if (name := arena_policy(model)) is None:
        raise ValueError(
            f"speculation.drafter.path: got {path!r} with policy.model {model!r}; must be the path of a checkpoint "
            "because only arena policies have a drafter of their own: `paceline draft train` makes one"
        )
    return drafter.find(name, kind, context)


def make_task(config: Config, tokenizer: Tokenizer) -> Task:
    """Return the prompts and reward of `config.data`."""
    num_heldout = config.eval.num_prompts if config.eval.every else 0
    if isinstance(config.data, ArenaData):
        return arena_task(tokenizer, seed=config.data.seed + config.run.seed, num_heldout=num_heldout)
    room = config.rollout.engine.max_model_len - config.rollout.max_tokens
    return load_task(config.data, tokenizer, seed=config.run.seed, num_heldout=num_heldout, max_prompt_tokens=room)
