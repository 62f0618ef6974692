"""The arena as a workload that sessions can name: policies `arena:tiny`, their drafters, and data of kind `arena`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from paceline.context import Context
from paceline.lab.arena.prompts import DRAFTER_DATA, arena_task, drafter_prompts
from paceline.orchestrator.task import Task
from paceline.types import Prompt, Tokenizer


class ArenaWorkload:
    """A `sessions.workloads.Workload`; imports torch and transformers only when a policy or drafter is asked for."""

    drafter_data = DRAFTER_DATA

    @property
    def policy_names(self) -> tuple[str, ...]:
        from paceline.lab.arena import policy

        return policy.NAMES

    def policy(self, name: str, context: Context) -> Path:
        from paceline.lab.arena import policy

        return policy.find(name, context)

    def drafter(self, policy_name: str, kind: str, context: Context) -> Path:
        from paceline.lab.arena import drafter

        return drafter.find(policy_name, kind, context)

    def drafter_prompts(self, tokenizer: Tokenizer) -> Iterator[Prompt]:
        return drafter_prompts(tokenizer)

    def task(self, tokenizer: Tokenizer, *, seed: int, num_heldout: int) -> Task:
        return arena_task(tokenizer, seed=seed, num_heldout=num_heldout)
