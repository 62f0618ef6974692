"""The arena's problems as prompts for the loop and for drafter training."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.arena import task
from paceline.orchestrator.task import Task, make_prompt
from paceline.types import Prompt, Tokenizer

_DRAFTER_SEED = 2_000_000
"""Seed of the problems for drafter training, distinct from supervised training and RL runs."""
DRAFTER_DATA = "arena problems that are not used in RL runs or supervised training"
"""Description of `drafter_prompts` for a drafter's model card."""


def arena_task(tokenizer: Tokenizer, *, seed: int, num_heldout: int) -> Task:
    """Return an infinite stream of problems, and held-out problems that do not depend on the seed."""

    def prompt_of(problem: task.Problem) -> Prompt:
        return make_prompt(problem.id, problem.prompt, {"answer": problem.answer}, tokenizer)

    return Task(
        prompts=map(prompt_of, task.problems(seed)),
        heldout=[prompt_of(problem) for problem in task.heldout(num_heldout)],
        reward=task.reward,
    )


def drafter_prompts(tokenizer: Tokenizer, *, seed: int = 0) -> Iterator[Prompt]:
    """Yield problems to sample a drafter's rollouts from."""
    return arena_task(tokenizer, seed=_DRAFTER_SEED + seed, num_heldout=0).prompts
