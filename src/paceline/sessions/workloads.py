"""Registry of workloads that bring policies, drafters and prompts of their own, by the prefix of their names.

    register("arena", workload)                       # by `paceline.lab.register`, which only the command line calls
    resolve_policy("arena:small", context)            # the workload builds or finds the checkpoint
    resolve_policy("checkpoints/qwen3", context)      # any other name is a checkpoint directory
    resolve_drafter("arena", "arena:small", context)  # the drafter that the workload keeps for that policy

Sessions know no workload by itself, so everything works on the user's checkpoints and data when none is registered.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from paceline.config import ArenaData, Config
from paceline.context import Context
from paceline.files import verify_checksums
from paceline.orchestrator.task import Task, load_task
from paceline.types import Prompt, Tokenizer


class Workload(Protocol):
    """Policies by name, a drafter for each of them, and a task."""

    @property
    def policy_names(self) -> tuple[str, ...]:
        """Names that follow the prefix and a colon."""
        ...

    @property
    def drafter_data(self) -> str:
        """Description of `drafter_prompts`, for a drafter's model card."""
        ...

    def policy(self, name: str, context: Context) -> Path:
        """Return the policy's checkpoint directory, and build it first when it is missing."""
        ...

    def drafter(self, policy_name: str, kind: str, context: Context) -> Path:
        """Return the directory of the policy's drafter of this kind, and make it first when it is missing."""
        ...

    def drafter_prompts(self, tokenizer: Tokenizer) -> Iterator[Prompt]:
        """Yield prompts for drafter training that no RL run sees."""
        ...

    def task(self, tokenizer: Tokenizer, *, seed: int, num_heldout: int) -> Task:
        """Return prompts and reward of RL runs."""
        ...


_workloads: dict[str, Workload] = {}


def register(prefix: str, workload: Workload) -> None:
    """Make `prefix:NAME` a policy, and `prefix` a drafter's path and a kind of data."""
    _workloads[prefix] = workload


def split(model: str) -> tuple[str, str] | None:
    """Return prefix and name of a workload's policy, or None for a checkpoint directory."""
    prefix, colon, name = model.partition(":")
    if prefix in _workloads and colon:
        return prefix, name
    return (prefix, name) if colon and prefix.isidentifier() and not Path(model).exists() else None


def find(prefix: str, *, key: str, got: str) -> Workload:
    """Return the workload of this prefix; the error names the config `key` and says what to do."""
    if prefix not in _workloads:
        known = ", ".join(sorted(_workloads)) or "none: paceline.lab, which brings `arena`, is not installed"
        raise ValueError(
            f"{key}: got {got!r}, but there is no workload {prefix!r} (registered: {known}); "
            "must name a checkpoint directory and data of your own (examples/own_task), or a registered workload"
        )
    return _workloads[prefix]


def resolve_policy(model: str, context: Context) -> Path:
    """Return the checkpoint directory of `prefix:NAME`, built if it is missing, or of a path; its checksums, if it has
    any, are verified."""
    workload = split(model)
    if workload is not None:
        prefix, name = workload
        return find(prefix, key="policy.model", got=model).policy(name, context)
    path = Path(model)
    for name in ("config.json", "tokenizer.json"):
        if not (path / name).is_file():
            raise ValueError(
                f"policy.model: got {model!r}, which has no {name}; must be "
                + " or one of ".join(("a Hugging Face checkpoint directory", *_known_policies()))
            )
    verify_checksums(path)
    return path


def _known_policies() -> list[str]:
    names = [f"{prefix}:{name}" for prefix, workload in _workloads.items() for name in workload.policy_names]
    return [", ".join(names)] if names else []


def resolve_drafter(path: str, model: str, context: Context, *, kind: str = "eagle3") -> Path:
    """Return the directory of a drafter; a workload's prefix as `path` stands for the drafter of its policy `model`."""
    if "/" in path or (path not in _workloads and Path(path).exists()):
        return Path(path)
    workload = find(path, key="speculation.drafter.path", got=path)
    named = split(model)
    if named is None or named[0] != path:
        raise ValueError(
            f"speculation.drafter.path: got {path!r} with policy.model {model!r}; must be the path of a checkpoint "
            f"because "
            f"only {path} policies have a drafter of their own: `paceline draft train` makes one"
        )
    return workload.drafter(named[1], kind, context)


def make_task(config: Config, tokenizer: Tokenizer) -> Task:
    """Return prompts and reward as `config.data` says."""
    num_heldout = config.eval.num_prompts if config.eval.every else 0
    if isinstance(config.data, ArenaData):
        workload = find(config.data.kind, key="data.kind", got=config.data.kind)
        return workload.task(tokenizer, seed=config.data.seed + config.run.seed, num_heldout=num_heldout)
    room = config.rollout.engine.max_model_len - config.rollout.max_tokens
    return load_task(config.data, tokenizer, seed=config.run.seed, num_heldout=num_heldout, max_prompt_tokens=room)
